"""Where documents come from: local text, wikitext pages, and the running interpreter's standard library."""

import importlib.util
import json
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from sbeval.corpora.documents import Corpus, Document, make_document
from sbeval.errors import UserError

STDLIB_LEFT_OUT = frozenset(
    {
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
    }
)

_LEVEL_1_HEADING = re.compile(r"\s*= (?!=)[^\n]*(?<!=) =\s*")


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """Returns the standard library's own sources, one document a file, in the order of their path's hash.

    Tests are left out because they are half of the bytes, the encodings, IDLE and others because they repeat
    themselves. The order is a shuffle that is the same on every machine.

    Args:
        root: folder to read, by default the running interpreter's library.
    """
    library = Path(sysconfig.get_paths()["stdlib"]) if root is None else root

    def documents() -> Iterator[Document]:
        paths = [
            path.relative_to(library).as_posix()
            for path in library.rglob("*.py")
            if not STDLIB_LEFT_OUT.intersection(path.relative_to(library).parts)
        ]
        for path in sorted(paths, key=lambda path: sha256(path.encode()).digest()):
            text = importlib.util.decode_source((library / path).read_bytes())
            if text.strip():
                yield make_document(path, text)

    if not library.is_dir():
        raise UserError(
            f"Expected the standard library's sources in {library}, found no such folder: "
            "run under a Python installation that ships its sources, or name a text with data_path."
        )
    return Corpus(name="stdlib", documents=documents, detail=f"{platform.python_implementation()} {_version()}")


def wikitext_corpus(pages: Callable[[], Iterator[str]], *, detokenize: Callable[[str], str]) -> Corpus:
    """Returns wikitext pages, detokenised; words and bytes are those of the page as it came."""

    def documents() -> Iterator[Document]:
        for index, page in enumerate(pages()):
            title = page.strip().partition("\n")[0].strip(" =")
            yield make_document(f"{index:03d} {title}", detokenize(page), original=page)

    return Corpus(name="wikitext", documents=documents)


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


def local_corpus(path: Path, *, name: str = "text") -> Corpus:
    """Returns the documents of a .txt or .jsonl file, or of a folder of such files.

    A .txt file is one document, a .jsonl one a line (its `text` field, or the line where it is a string), a folder
    holds the documents of its files in the order of their names. A file with another ending is read as text.
    """
    if not path.exists():
        raise UserError(
            f"Expected a text file or folder at data_path {str(path)!r}, found nothing there: check the path."
        )

    def documents() -> Iterator[Document]:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        found = False
        for file in files:
            base = file.relative_to(path).as_posix() if path.is_dir() else file.name
            for document in _file_documents(file, base):
                found = True
                yield document
        if not found:
            raise UserError(f"Expected text in data_path {str(path)!r}, found none: give a file or folder with text.")

    return Corpus(name=name, documents=documents, detail=path.name)


def read_text(path: Path) -> str:
    """Returns a file's text with its line ends as line feeds, as Python's text mode reads it."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected UTF-8 text in {str(path)!r}, found byte {error.object[error.start]:#04x} at {error.start}: "
            "convert the file to UTF-8."
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        raise UserError(f"Expected text in {str(path)!r}, found a binary file (it holds zero bytes): give a text file.")
    return text


def _file_documents(file: Path, name: str) -> Iterator[Document]:
    if file.suffix != ".jsonl":
        text = read_text(file)
        if text.strip():
            yield make_document(name, text)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text = _jsonl_text(line, file, number)
                if text.strip():
                    yield make_document(f"{name}:{number}", text)


def _jsonl_text(line: bytes, file: Path, number: int) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError:
        raise UserError(
            f"Expected JSON in line {number} of {str(file)!r}, found something else: write one JSON value a line."
        ) from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(
            f'Expected a string, or an object with a string "text", in line {number} of {str(file)!r}, found none: '
            "rename the field that holds the text."
        )
    return text


def _version() -> str:
    return platform.python_version()
