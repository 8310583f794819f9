"""RULER's texts, from disk or the hub: essays as a haystack, and questions with their documents.

Essays are split into sentences without any download. Questions come in the layouts of SQuAD 2 and of HotpotQA's
distractor setting.
"""

import dataclasses
import functools
import hashlib
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import read_text
from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.writing import whole_file
from sbeval.tasks.ruler.haystacks import EssayHaystack
from sbeval.tasks.ruler.wording import qa_source
from sbeval.tasks.tokens import LINE_START, WORDS, TokenCounter

OFFLINE_TASKS = "sb_niah_single_1, sb_niah_multikey_2, sb_niah_multikey_3, sb_ruler_vt, sb_ruler_cwe and sb_ruler_fwe"


class Missing(NamedTuple):
    """A corpus that could not be loaded.

    Attributes:
        key: the key of `--metadata` that gives a local copy.
        form: what the key takes, "DIR" or "FILE".
        source: where it was looked for.
        reason: what went wrong, in a word.
    """

    key: str
    form: str
    source: str
    reason: str


class MissingCorpus(UserError):
    """One or more corpora are missing; the message says how to give them, and which tasks need none.

    Args:
        missing: the corpora, at least one.
        tasks: the tasks that need them, where they are known.
    """

    def __init__(self, missing: Sequence[Missing], tasks: Sequence[str] = ()) -> None:
        self.missing = tuple(missing)
        where = ", ".join(f"{one.key} from {one.source} ({one.reason})" for one in missing)
        keys = ", ".join(f'"{one.key}": "{one.form}"' for one in missing)
        super().__init__(
            f"{', '.join(tasks) or 'RULER'} expected text that could not be loaded: {where}; give it with --metadata "
            f"'{{{keys}}}', or run {OFFLINE_TASKS}, which need none."
        )


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
    # a run's record of its inputs leaves hidden files out
    below = (file for file in path.glob("*.txt") if not file.name.startswith("."))
    files = sorted(below) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise UserError(
            f"Expected essays as a .txt file or a folder of them at {path}, and found none; check "
            '--metadata \'{"essays": "DIR"}\'.'
        )
    return " ".join(read_text(file) for file in files)


def _read_hub() -> str:
    import datasets

    try:
        on_hub_or_kept(HUB_DATASET)
        rows = datasets.load_dataset(HUB_DATASET, split="train")
    except Exception as error:
        raise MissingCorpus([Missing("essays", "DIR", HUB_DATASET, type(error).__name__)]) from error
    return " ".join(rows["text"])


def on_hub_or_kept(dataset: str) -> None:
    """Raises ConnectionError where neither the hub's name resolves nor its client has the dataset on disk.

    It answers at once; the client would try for half a minute.
    """
    import datasets

    if (Path(datasets.config.HF_DATASETS_CACHE) / dataset.replace("/", "___")).is_dir():
        return
    if urllib.request.getproxies():  # names are then resolved elsewhere
        return
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(datasets.config.HF_ENDPOINT).hostname, 443)
    except OSError as error:
        raise ConnectionError from error


Dataset = Literal["squad", "hotpotqa"]
_KEYS = {"squad": "squad", "hotpotqa": "hotpot"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One answerable question.

    Attributes:
        text: the question.
        answers: its answer's aliases, each once.
        gold: its own documents.
        more: other documents of the same article.
    """

    text: str
    answers: Sequence[str]
    gold: Sequence[int]
    more: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QaCorpus:
    """Questions, and the documents that all prompts are filled with.

    Attributes:
        documents: every document once, sorted.
        questions: in the order of the file.
        sha256: hash of the file.
        source: where it came from.
    """

    documents: Sequence[str]
    questions: Sequence[Question]
    sha256: str
    source: str


@functools.lru_cache(maxsize=2)
def load_qa(dataset: Dataset, path: str | None) -> QaCorpus:
    """Reads a corpus from a local file, or downloads it once where no path is given.

    Raises:
        UserError: the file is missing, cannot be downloaded, or has another layout.
    """
    raw, source = (_read_file(Path(path).expanduser()), path) if path else _download(dataset)
    try:
        documents, questions = (_squad if dataset == "squad" else _hotpotqa)(json.loads(raw))
    except (ValueError, KeyError, TypeError) as error:
        layout = "SQuAD 2 (data, paragraphs, qas)" if dataset == "squad" else "HotpotQA's distractor setting"
        raise UserError(
            f"Expected {source} in the layout of {layout}, and found another one ({error!r}); name a file in it."
        ) from error
    if not questions:
        raise UserError(f"Expected answerable questions in {source}, and found none; name another file.")
    return QaCorpus(documents=documents, questions=questions, sha256=hashlib.sha256(raw).hexdigest(), source=source)


def _squad(data: Mapping[str, Any]) -> tuple[list[str], list[Question]]:
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data["data"]]
    documents = sorted({context for contexts in articles for context in contexts})
    number = {context: i for i, context in enumerate(documents)}
    questions = []
    for article, contexts in zip(data["data"], articles, strict=True):
        for paragraph in article["paragraphs"]:
            gold = number[paragraph["context"]]
            more = [i for i in dict.fromkeys(number[context] for context in contexts) if i != gold]
            for entry in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                if not entry["is_impossible"] and answers:
                    questions.append(Question(text=entry["question"], answers=answers, gold=(gold,), more=tuple(more)))
    return documents, questions


def _hotpotqa(data: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Question]]:
    shown = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in data]
    documents = sorted({document for entry in shown for document in entry})
    number = {document: i for i, document in enumerate(documents)}
    questions = [
        Question(
            text=entry["question"],
            answers=(entry["answer"],),
            gold=tuple(dict.fromkeys(number[document] for document in own)),
        )
        for entry, own in zip(data, shown, strict=True)
    ]
    return documents, questions


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"Expected a corpus file at {path}, and found none; check the path in --metadata.")
    return path.read_bytes()


def _download(dataset: Dataset) -> tuple[bytes, str]:
    url = qa_source(dataset)
    kept = cache_folder("ruler") / f"{dataset}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    if kept.is_file():
        return kept.read_bytes(), url
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            raw = bytes(response.read())
    except OSError as error:
        raise MissingCorpus([Missing(_KEYS[dataset], "FILE", url, type(error).__name__)]) from error
    with whole_file(kept, "downloaded questions") as part:
        part.write_bytes(raw)
    return raw, url
