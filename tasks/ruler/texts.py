"""Loads essays for haystacks, from local files or the hub, and splits them into sentences; reports missing texts."""

import hashlib
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import read_text
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.content import cached_by_content
from sbeval.tasks.ruler.haystacks import EssayHaystack, running_totals
from sbeval.tasks.tokens import LINE_START, WORDS, TokenCounter

OFFLINE_TASKS = "sb_niah_single_1, sb_niah_multikey_2, sb_niah_multikey_3, sb_ruler_vt, sb_ruler_cwe and sb_ruler_fwe"


class Missing(NamedTuple):
    """A corpus that could not be loaded.

    Attributes:
        key: the option that names a local copy.
        form: a placeholder for the option's value, "DIR" or "FILE".
        source: the path, dataset id or address that failed.
        reason: why it failed.
    """

    key: str
    form: str
    source: str
    reason: str


class MissingCorpus(UserError):
    """One or more corpora are missing; the message says how to name local copies, and which tasks need no corpus."""

    def __init__(self, missing: Sequence[Missing], tasks: Sequence[str] = ()) -> None:
        self.missing = tuple(missing)
        where = ", ".join(f"{corpus.key} from {corpus.source} ({corpus.reason})" for corpus in missing)
        keys = ", ".join(f'"{corpus.key}": "{corpus.form}"' for corpus in missing)
        super().__init__(
            f"{', '.join(tasks) or 'RULER'} needs text that could not be loaded: {where}; name a local copy with "
            f"--metadata '{{{keys}}}', or run {OFFLINE_TASKS}, which need no text."
        )


HUB_DATASET = "baber/paul_graham_essays"
SENTENCE_RULE = "sentence rule 1"

_OPENING, _CLOSING = "[\"'\u2018\u201c(\\[]*", "[\"'\u2019\u201d)\\]]*"
_SHORT = "Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Co|Corp|Ltd|vs|cf|etc|al|No|pp|Fig"
_END = re.compile(rf"[.!?]{_CLOSING}$")
_START = re.compile(rf"^{_OPENING}[A-Z0-9]")
_ABBREVIATION = re.compile(rf"^{_OPENING}(?:(?:[A-Za-z]\.)+|(?:{_SHORT})\.)$")


class Essays(NamedTuple):
    """The text of essays.

    Attributes:
        words: all words, in order.
        sentence_starts: indices of the words that begin a sentence, int64 [sentences].
        sha256: hash of the words.
        source: a local path or the dataset's id.
    """

    words: list[str]
    sentence_starts: NDArray[np.int64]
    sha256: str
    source: str

    def haystack(self, counter: TokenCounter) -> EssayHaystack:
        """Returns a haystack of the words, with their token counts by the tokenizer of `counter`."""
        tokens = counter.count_pool([" " + word for word in self.words], WORDS)
        return EssayHaystack(
            words=self.words,
            cumulative_tokens=running_totals(tokens),
            sentence_starts=self.sentence_starts,
            first_word_tokens=int(counter.count_segments(self.words[:1], LINE_START)[0]),
        )


def sentence_starts(words: list[str]) -> NDArray[np.int64]:
    """Returns the indices of the words that begin a sentence, int64 [sentences].

    A sentence ends after a word that ends with `.`, `!` or `?` (closing quotes and brackets may follow) if the word is
    no common abbreviation or initial, and the next word begins with a capital letter or a digit.
    """
    starts = [0]
    for i in range(1, len(words)):
        before = words[i - 1]
        if _END.search(before) and _START.match(words[i]) and not _ABBREVIATION.match(before):
            starts.append(i)
    return np.array(starts, dtype=np.int64)


@cached_by_content(2)
def load_essays(path: str | None) -> Essays:
    """Reads essays from a text file or a folder of .txt files; if `path` is None, from the hub.

    Raises:
        UserError: there are no essays, or the hub cannot be reached.
    """
    if path:
        words = _read_folder(local_path(path)).split()
    else:
        words = " ".join(load_from_hub("essays", "DIR", HUB_DATASET, split="train")["text"]).split()
    if not words:
        raise UserError(f"The essays at {path or HUB_DATASET} hold no words; name a folder of .txt files.")
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
    return Essays(words, sentence_starts(words), digest, path or HUB_DATASET)


def _read_folder(path: Path) -> str:
    if path.is_dir():
        # hidden files are skipped, since the record of a run's inputs skips them too
        files = sorted(file for file in path.glob("*.txt") if not file.name.startswith("."))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UserError(
            f"Expected essays as a .txt file or a folder of them at {path}, and found none; check "
            '--metadata \'{"essays": "DIR"}\'.'
        )
    return " ".join(read_text(file) for file in files)


def load_from_hub(key: str, form: str, dataset: str, config: str | None = None, **options: Any) -> Any:
    """Loads a dataset from the hub.

    Args:
        key: the option that names a local copy, for the error.
        form: a placeholder for the option's value, for the error.
        dataset: id on the hub.
        config: the dataset's configuration.
        **options: further arguments of `datasets.load_dataset`.

    Raises:
        MissingCorpus: the dataset cannot be loaded.
    """
    import datasets  # imported late: it takes seconds, and options are read without it

    try:
        on_hub_or_cached(dataset)
        return datasets.load_dataset(dataset, config, **options)
    except Exception as error:  # the hub's client raises many unrelated classes when it cannot be reached
        raise MissingCorpus([Missing(key, form, dataset, type(error).__name__)]) from error


def on_hub_or_cached(dataset: str) -> None:
    """Checks that the dataset is in the hub client's cache, or that the hub's host name resolves.

    The check is immediate; without a network the hub's client would retry for half a minute.

    Raises:
        ConnectionError: the dataset is not cached, and the host name does not resolve.
    """
    import datasets  # imported late: it takes seconds, and options are read without it

    if (Path(datasets.config.HF_DATASETS_CACHE) / dataset.replace("/", "___")).is_dir():
        return
    if urllib.request.getproxies():  # host names need not resolve here: the proxy resolves them
        return
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(datasets.config.HF_ENDPOINT).hostname, 443)
    except OSError as error:
        raise ConnectionError from error
