"""A document: the unit a corpus is made of, and the cluster behind every interval."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import NamedTuple

MARK = "\ufeff"
"""A byte order mark, decoded: at the beginning of a text it says how the text is encoded, and is none of it."""
MARK_LEFT_OUT = "byte order mark left out"
_COUNTED_TOGETHER = 2**20

Changes = dict[str, set[str]]
"""What was done to texts as they were read, with the names of the documents it was done to."""


class Document(NamedTuple):
    """One document, with words and bytes of the page before any preprocessing, as lm-eval counts them.

    The name is unique within its corpus, and names the cluster in results.
    """

    name: str
    text: str
    original_words: int
    original_bytes: int


class Corpus(NamedTuple):
    """A named text source; `detail` identifies it further, such as an interpreter's version.

    `documents` starts a fresh pass over the documents, in an order that never changes. It fills `changes`.
    """

    name: str
    documents: Callable[[], Iterator[Document]]
    detail: str | None = None
    changes: Changes | None = None

    def recorded_detail(self) -> str | None:
        """Returns `detail` with what was changed in the documents read so far, such as a byte order mark left out."""
        changed = sorted((self.changes or {}).items())
        texts = [f"{change} in {len(names)} document{'s' * (len(names) > 1)}" for change, names in changed]
        return ", ".join(filter(None, (self.detail, *texts))) or None


def count_words(text: str) -> int:
    """Returns the number of pieces `text` has when split at runs of white space, empty end pieces included.

    This is the count behind lm-eval's word perplexity.
    """
    if not text:
        return 1
    count = 0
    before = " "
    for start in range(0, len(text), _COUNTED_TOGETHER):
        piece = text[start : start + _COUNTED_TOGETHER]
        count += len(piece.split()) - (not before.isspace() and not piece[0].isspace())
        before = piece[-1]
    return count + text[0].isspace() + text[-1].isspace()


def make_document(name: str, text: str, *, original: str | None = None) -> Document:
    """Returns a document whose words and bytes are counted on `original`, or on `text` where nothing was changed."""
    page = text if original is None else original
    return Document(name, text, count_words(page), len(page.encode("utf-8", "surrogatepass")))


def without_marks(documents: Iterator[Document], changes: Changes) -> Iterator[Document]:
    """Yields documents without a byte order mark in front of their text, but for those that hold nothing else."""
    for document in documents:
        if document.text.startswith(MARK):
            changes.setdefault(MARK_LEFT_OUT, set()).add(document.name)
            document = make_document(document.name, document.text.removeprefix(MARK))
        if document.text.strip():
            yield document


def corpus_sha256(corpus: Corpus) -> str:
    """Returns the hash over every document's name, text and original counts, in order."""
    digest = sha256()
    for document in corpus.documents():
        text = document.text.encode("utf-8", "surrogatepass")
        head = f"{document.name}\0{document.original_words}\0{document.original_bytes}\0{len(text)}\0"
        digest.update(head.encode("utf-8", "surrogatepass"))
        digest.update(text)
    return digest.hexdigest()
