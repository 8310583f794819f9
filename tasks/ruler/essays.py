"""Essays as a haystack: read from disk or the hub, and split into sentences without any download."""

import dataclasses
import functools
import hashlib
import re
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import read_text
from sbeval.errors import UserError
from sbeval.tasks.ruler.haystacks import EssayHaystack
from sbeval.tasks.ruler.missing import Missing, MissingCorpus
from sbeval.tasks.ruler.tokens import LINE_START, WORDS, TokenCounter

HUB_DATASET = "baber/paul_graham_essays"
SENTENCE_RULE = "sentence rule 1"

_OPENING, _CLOSING = "[\"'\u2018\u201c(\\[]*", "[\"'\u2019\u201d)\\]]*"
_SHORT = "Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Co|Corp|Ltd|vs|cf|etc|al|No|pp|Fig"
_END = re.compile(rf"[.!?]{_CLOSING}$")
_START = re.compile(rf"^{_OPENING}[A-Z0-9]")
_ABBREVIATION = re.compile(rf"^{_OPENING}(?:(?:[A-Za-z]\.)+|(?:{_SHORT})\.)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Essays:
    """The text of some essays.

    Attributes:
        words: all words in order.
        sentence_starts: words that begin a sentence, int64 [sentences].
        sha256: hash of the text.
        source: where it came from.
    """

    words: list[str]
    sentence_starts: NDArray[np.int64]
    sha256: str
    source: str

    def haystack(self, counter: TokenCounter) -> EssayHaystack:
        """Returns the words with their token counts."""
        spaced = [" " + word for word in self.words]
        tokens = counter.count_pool(spaced, WORDS)
        return EssayHaystack(
            words=self.words,
            cumulative_tokens=np.concatenate(([0], np.cumsum(tokens))),
            sentence_starts=self.sentence_starts,
            first_word_tokens=int(counter.count_pieces(self.words[:1], LINE_START)[0]),
        )


def sentence_starts(words: list[str]) -> NDArray[np.int64]:
    """Returns the words that begin a sentence, int64.

    A sentence ends at a word with final `.`, `!` or `?`, closing quotes and brackets aside, that is no common
    abbreviation or initial, where the next word begins with a capital or a digit.
    """
    starts = [0]
    for i in range(1, len(words)):
        before = words[i - 1]
        if _END.search(before) and _START.match(words[i]) and not _ABBREVIATION.match(before):
            starts.append(i)
    return np.array(starts, dtype=np.int64)


@functools.lru_cache(maxsize=2)
def load_essays(path: str | None) -> Essays:
    """Reads essays from a text file or a folder of them, or from the hub where no path is given.

    Raises:
        UserError: there is nothing to read, or the hub cannot be reached.
    """
    words = (_read_folder(Path(path).expanduser()) if path else _read_hub()).split()
    if not words:
        raise UserError(f"Expected essays at {path or HUB_DATASET}, and found no words; name a folder of .txt files.")
    return Essays(
        words=words,
        sentence_starts=sentence_starts(words),
        sha256=hashlib.sha256(" ".join(words).encode()).hexdigest(),
        source=path or HUB_DATASET,
    )


def _read_folder(path: Path) -> str:
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise UserError(
            f"Expected essays as a .txt file or a folder of them at {path}, and found none; check "
            '--metadata \'{"essays": "DIR"}\'.'
        )
    return " ".join(read_text(file) for file in files)


def _read_hub() -> str:
    import datasets

    try:
        if not _hub_can_be_found() and not _kept(datasets.config):
            raise ConnectionError
        rows = datasets.load_dataset(HUB_DATASET, split="train")
    except Exception as error:
        raise MissingCorpus([Missing("essays", "DIR", HUB_DATASET, type(error).__name__)]) from error
    return " ".join(rows["text"])


def _hub_can_be_found() -> bool:
    """Returns whether the hub's name resolves, which takes no time, where its client would try for half a minute."""
    import datasets

    if urllib.request.getproxies():  # names are then resolved elsewhere
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(datasets.config.HF_ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _kept(config: Any) -> bool:
    """Returns whether the hub's client has the essays on disk."""
    return (Path(config.HF_DATASETS_CACHE) / HUB_DATASET.replace("/", "___")).is_dir()
