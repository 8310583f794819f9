"""Questions with their documents, in the layouts of SQuAD 2 and of HotpotQA's distractor setting."""

import dataclasses
import functools
import hashlib
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sbeval.errors import UserError
from sbeval.tasks.ruler.cache import cache_folder
from sbeval.tasks.ruler.missing import Missing, MissingCorpus
from sbeval.tasks.ruler.wording import qa_source

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
    kept = cache_folder() / f"{dataset}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    if kept.is_file():
        return kept.read_bytes(), url
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            raw = bytes(response.read())
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        part.write_bytes(raw)
        part.replace(kept)
    except OSError as error:
        raise MissingCorpus([Missing(_KEYS[dataset], "FILE", url, type(error).__name__)]) from error
    return raw, url
