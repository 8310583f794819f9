"""Named corpora: datasets of the Hugging Face hub, wikitext, and the interpreter's standard library.

`KNOWN` says which split and field hold the text of some hub datasets, taken from their dataset cards and files. For
other datasets the user names split and field.
"""

import dataclasses
import io
import os
import platform
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from sbeval.corpora.documents import Changes, Corpus, Document, make_document, without_marks
from sbeval.errors import UserError, first_line

STDLIB_LEFT_OUT = frozenset(
    [
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "distutils",
        "site-packages",
        "dist-packages",
        "__pycache__",
    ]
)
_LEVEL_1_HEADING = re.compile(r"\s*= (?!=)[^\n]*(?<!=) =\s*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HubText:
    """The place of the documents in a hub dataset.

    Attributes:
        path: dataset such as "NeelNanda/pile-10k".
        config: configuration of the dataset.
        split: split of the dataset.
        text_field: column that holds the text; "document.text" is the field `text` of the column `document`.
        document_field: column that identifies a document, for datasets that repeat one in several rows; None if each
            row is one document.
        only: a column and a value; only rows with this value are read. None for all rows.
    """

    path: str
    config: str | None = None
    split: str = "train"
    text_field: str = "text"
    document_field: str | None = None
    only: tuple[str, str] | None = None

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields name and text of each document, empty texts included, in the dataset's order.

        Raises:
            UserError: the dataset does not load, or has no such column.
        """
        table = self._load()
        text = self._column(table, self.text_field)
        names = None if self.document_field is None else self._column(table, self.document_field)
        kinds = None if self.only is None else self._column(table, self.only[0])
        seen: set[str] = set()
        for row in range(len(text)):
            if kinds is not None and self.only is not None and kinds[row].as_py() != self.only[1]:
                continue
            name = f"{row:06d}" if names is None else str(names[row].as_py())
            if name not in seen:
                seen.add(name)
                yield name, text[row].as_py() or ""

    def _load(self) -> Any:
        import datasets  # takes seconds to import

        try:
            return datasets.load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # the hub's client raises many unrelated classes when it cannot be reached
            raise UserError(
                f"The split {self.split!r} of {self.path!r} from the Hugging Face hub does not load "
                f"({first_line(error)}): go online once, correct the name, or give local text with "
                '--metadata \'{"data_path": "..."}\'.'
            ) from error

    def _column(self, table: Any, field: str) -> Any:
        """Returns a column as memory-mapped Arrow data, so that only the rows that are used are read."""
        import pyarrow.compute as pc  # slow import that only hub datasets need

        known = list(table.features.flatten())
        if field not in known:
            raise UserError(
                f"{self.path!r} has no column {field!r}, only {known}: "
                'name the column that holds the text with --metadata \'{"text_field": "..."}\'.'
            )
        first, *nested = field.split(".")
        column = table.data.table[first]
        for name in nested:
            column = pc.struct_field(column, name)
        return column


KNOWN: dict[str, HubText] = {
    text.path: text
    for text in (
        HubText(path="EleutherAI/wikitext_document_level", config="wikitext-2-raw-v1", split="test", text_field="page"),
        HubText(path="NeelNanda/pile-10k"),
        # 100 books
        HubText(path="emozilla/pg19-test", split="test"),
        HubText(path="emozilla/pg19", split="test"),
        # 61,373 Python files
        HubText(path="codeparrot/codeparrot-clean-valid", text_field="content"),
        # 10,557 questions on some hundred books and film scripts, each repeated for every question
        HubText(
            path="deepmind/narrativeqa",
            split="test",
            text_field="document.text",
            document_field="document.id",
            only=("document.kind", "gutenberg"),
        ),
    )
}


def hub_text(
    dataset: str, *, config: str | None = None, split: str | None = None, text_field: str | None = None
) -> HubText:
    """Returns where a dataset holds its text: the entry in `KNOWN`, else the column `text` of the split `train`.

    Arguments that are not None override the entry. `dataset` is a name on the hub, or a local copy in a folder whose
    path ends with that name.
    """
    options = {"config": config, "split": split, "text_field": text_field}
    changes: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    name = "/".join(dataset.rstrip("/").split("/")[-2:])
    return dataclasses.replace(KNOWN.get(name, HubText(path=dataset)), path=dataset, **changes)


def hub_corpus(source: HubText, *, name: str) -> Corpus:
    """Returns the documents of a hub dataset; empty documents and byte order marks are dropped."""
    changes: Changes = {}

    def documents() -> Iterator[Document]:
        empty = True
        texts = (make_document(document_name, text) for document_name, text in source.texts() if text.strip())
        for document in without_marks(texts, changes):
            empty = False
            yield document
        if empty:
            raise UserError(
                f"{source.text_field!r} in the split {source.split!r} of {source.path!r} holds no text: "
                'name another with --metadata \'{"text_field": "...", "dataset_split": "..."}\'.'
            )

    config = f"/{source.config}" if source.config else ""
    detail = f"{source.path}{config}:{source.split}"
    return Corpus(name=name, documents=documents, detail=detail, changes=changes)


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """Returns the sources of Python's standard library, one document a file.

    Documents are sorted by the hash of their path, which shuffles them in the same way on every machine. Tests are left
    out because they make up half of the bytes. Encodings, IDLE and some other packages are left out because their text
    is repetitive.

    Args:
        root: folder of the library; None takes that of the running interpreter.
    """
    changes: Changes = {}
    library = Path(sysconfig.get_paths()["stdlib"]) if root is None else root

    def sources() -> Iterator[Document]:
        paths = []
        for folder, folders, files in os.walk(library):
            folders[:] = [name for name in folders if name not in STDLIB_LEFT_OUT]
            paths += [(Path(folder) / file).relative_to(library).as_posix() for file in files if file.endswith(".py")]
        for path in sorted(paths, key=lambda path: sha256(path.encode()).digest()):
            raw = (library / path).read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
            yield make_document(path, raw.decode("utf-8" if encoding == "utf-8-sig" else encoding))

    if not library.is_dir():
        raise UserError(
            f"The standard library's sources are missing: there is no folder {library}. Use a Python installation with "
            "sources, or name a text with data_path."
        )
    return Corpus(
        name="stdlib",
        documents=lambda: without_marks(sources(), changes),
        detail=f"{platform.python_implementation()} {platform.python_version()}",
        changes=changes,
    )


def wikitext_corpus(
    pages: Callable[[], Iterator[str]],
    *,
    detokenize: Callable[[str], str],
    name: str = "wikitext",
    changes: Changes | None = None,
) -> Corpus:
    """Returns wikitext's pages as documents.

    Args:
        pages: function that returns a new iterator over the raw pages.
        detokenize: removes wikitext's tokenisation from a page; words and bytes are counted before that.
        name: name of the corpus.
        changes: dictionary that `pages` fills with changes made while reading, see `Corpus.changes`.
    """

    def documents() -> Iterator[Document]:
        for index, page in enumerate(pages()):
            title = page.strip().partition("\n")[0].strip(" =")
            yield make_document(f"{index:03d} {title}", detokenize(page), original=page)

    return Corpus(name=name, documents=documents, changes=changes)


def split_wikitext_pages(text: str) -> Iterator[str]:
    """Splits wikitext's raw text into pages at level-1 headings (` = Title = `); lines are not changed."""
    page: list[str] = []
    for line in text.split("\n"):
        if _LEVEL_1_HEADING.fullmatch(line):
            if "".join(page).strip():
                yield "\n".join(page)
            page = []
        page.append(line)
    if "".join(page).strip():
        yield "\n".join(page)
