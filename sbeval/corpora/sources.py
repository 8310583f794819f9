"""Corpora that have a name: datasets of the Hugging Face hub, wikitext, and the interpreter's standard library.

Where the text lies in the datasets of `KNOWN` was read off their own cards and files; a dataset that is not there is
read with the split and the field the user names.
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
    """Where documents lie in a dataset on the hub.

    Attributes:
        path: dataset such as "NeelNanda/pile-10k".
        text_field: column that holds the text; "document.text" is the field `text` of the column `document`.
        document_field: column that names a document, where several rows repeat one; None for one document a row.
        only: column and value of the rows that are taken, None for all of them.
    """

    path: str
    config: str | None = None
    split: str = "train"
    text_field: str = "text"
    document_field: str | None = None
    only: tuple[str, str] | None = None

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields name and text of each document in the dataset's order, empty texts too.

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
        import datasets  # seconds, which a command that reads no text does without

        try:
            return datasets.load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # the hub's client raises many unrelated classes when it cannot be reached
            raise UserError(
                f"Expected the split {self.split!r} of {self.path!r} from the Hugging Face hub, found that it does not "
                f"load ({first_line(error)}): go online once, correct the name, or give local text with "
                '--metadata \'{"data_path": "..."}\'.'
            ) from error

    def _column(self, table: Any, field: str) -> Any:
        """Returns a column as memory-mapped Arrow data, so that only rows that are asked for are read."""
        import pyarrow.compute as pc  # as above

        known = list(table.features.flatten())
        if field not in known:
            raise UserError(
                f"Expected a column {field!r} in {self.path!r}, found {known}: "
                'name the one that holds the text with --metadata \'{"text_field": "..."}\'.'
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
    """Returns where a dataset's text lies: as it is known here, else in `text` of `train`, changed where asked.

    The dataset is a name on the hub, or a local copy in a folder that ends with its name.
    """
    given = {"config": config, "split": split, "text_field": text_field}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    name = "/".join(dataset.rstrip("/").split("/")[-2:])
    return dataclasses.replace(KNOWN.get(name, HubText(path=dataset)), path=dataset, **changes)


def hub_corpus(source: HubText, *, name: str) -> Corpus:
    """Returns the documents of a hub dataset; those without text are left out, and byte order marks before a text."""
    changes: Changes = {}

    def documents() -> Iterator[Document]:
        empty = True
        texts = (make_document(document_name, text) for document_name, text in source.texts() if text.strip())
        for document in without_marks(texts, changes):
            empty = False
            yield document
        if empty:
            raise UserError(
                f"Expected text in {source.text_field!r} of the split {source.split!r} of {source.path!r}, found none: "
                'name another with --metadata \'{"text_field": "...", "dataset_split": "..."}\'.'
            )

    config = f"/{source.config}" if source.config else ""
    detail = f"{source.path}{config}:{source.split}"
    return Corpus(name=name, documents=documents, detail=detail, changes=changes)


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """Returns the standard library's own sources, one document a file, in the order of their path's hash.

    Tests are left out because they are half of the bytes, the encodings, IDLE and others because they repeat
    themselves. The order is a shuffle that is the same on every machine. By default the running interpreter's is read.
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
            f"Expected the standard library's sources in {library}, found no such folder: "
            "run under a Python installation that ships its sources, or name a text with data_path."
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
    """Returns wikitext pages, detokenised; words and bytes are those of the page as it came.

    `changes` is what reading the pages fills.
    """

    def documents() -> Iterator[Document]:
        for index, page in enumerate(pages()):
            title = page.strip().partition("\n")[0].strip(" =")
            yield make_document(f"{index:03d} {title}", detokenize(page), original=page)

    return Corpus(name=name, documents=documents, changes=changes)


def split_wikitext_pages(text: str) -> Iterator[str]:
    """Splits wikitext's raw text at its level-1 headings (` = Title = `), lines and their spaces unchanged."""
    page: list[str] = []
    for line in text.split("\n"):
        if _LEVEL_1_HEADING.fullmatch(line):
            if "".join(page).strip():
                yield "\n".join(page)
            page = []
        page.append(line)
    if "".join(page).strip():
        yield "\n".join(page)
