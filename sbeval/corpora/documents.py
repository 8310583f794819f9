"""Documents and corpora. The documents of a corpus are the clusters that the bootstrap of an interval resamples."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import NamedTuple

MARK = "\ufeff"
"""A byte order mark after decoding. At the start of a file it states the encoding and is not part of the text."""
MARK_LEFT_OUT = "byte order mark left out"
_CHUNK_CHARACTERS = 2**20

Changes = dict[str, set[str]]
"""Maps a change made while reading, such as `MARK_LEFT_OUT`, to the names of the changed documents."""


class Document(NamedTuple):
    """One document of a corpus.

    Attributes:
        name: name that is unique within the corpus; results use it as the name of the cluster.
        text: the text to tokenise.
        original_words: number of words of the original page, the text before preprocessing, counted as lm-eval does for
            word perplexity.
        original_bytes: number of UTF-8 bytes of the original page.
    """

    name: str
    text: str
    original_words: int
    original_bytes: int


class Corpus(NamedTuple):
    """A named text source.

    Attributes:
        name: name of the corpus.
        documents: function that returns a new iterator over the documents, always in the same order.
        detail: further identification of the source, such as the version of the interpreter.
        changes: changes made to the text, such as removed byte order marks; filled while documents are read.
    """

    name: str
    documents: Callable[[], Iterator[Document]]
    detail: str | None = None
    changes: Changes | None = None

    def recorded_detail(self) -> str | None:
        """Returns `detail` and the changes made to the documents read so far, as one string for the record."""
        changed = sorted((self.changes or {}).items())
        texts = [f"{change} in {len(names)} document{'s' * (len(names) > 1)}" for change, names in changed]
        return ", ".join(filter(None, (self.detail, *texts))) or None


def count_words(text: str) -> int:
    """Returns the number of words, counted as for lm-eval's word perplexity.

    It is the number of strings that a split at runs of white space gives. If the text begins or ends with white space,
    an empty string there counts too. The text is split in chunks to save memory.
    """
    if not text:
        return 1
    count, before = 0, " "
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        chunk = text[start : start + _CHUNK_CHARACTERS]
        word_goes_on = not before.isspace() and not chunk[0].isspace()
        count += len(chunk.split()) - word_goes_on
        before = chunk[-1]
    return count + text[0].isspace() + text[-1].isspace()


def make_document(name: str, text: str, *, original: str | None = None) -> Document:
    """Returns a document whose words and bytes are counted in `original`, the text before preprocessing.

    Without `original` they are counted in `text`.
    """
    page = text if original is None else original
    return Document(name, text, count_words(page), len(page.encode("utf-8", "surrogatepass")))


def without_marks(documents: Iterator[Document], changes: Changes) -> Iterator[Document]:
    """Removes a byte order mark from the start of each text; documents without any other text are dropped."""
    for document in documents:
        if document.text.startswith(MARK):
            changes.setdefault(MARK_LEFT_OUT, set()).add(document.name)
            document = make_document(document.name, document.text.removeprefix(MARK))
        if document.text.strip():
            yield document


def corpus_sha256(corpus: Corpus) -> str:
    """Returns the SHA-256 of names, texts and original word and byte counts of all documents, in order."""
    digest = sha256()
    for document in corpus.documents():
        text = document.text.encode("utf-8", "surrogatepass")
        head = f"{document.name}\0{document.original_words}\0{document.original_bytes}\0{len(text)}\0"
        digest.update(head.encode("utf-8", "surrogatepass"))
        digest.update(text)
    return digest.hexdigest()
