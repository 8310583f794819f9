"""Documents of local files: .txt, .jsonl and .parquet, plain or compressed with zstd or gzip, alone or in a folder.

Files are read piece by piece, so that memory holds one document and not one corpus.
"""

import codecs
import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sbeval.corpora.documents import MARK, Changes, Corpus, Document, make_document, without_marks
from sbeval.errors import UserError, first_line

logger = logging.getLogger(__name__)

MOST_DOCUMENT_BYTES = 512 * 2**20
_SURROGATE = re.compile("[\ud800-\udfff]")
_PIECE_BYTES = 2**20
_COMPRESSIONS = {".zst": "zstd", ".gz": "gzip"}
# UTF-32's first: in little-endian order it begins as UTF-16's does
_OTHER_MARKS = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}
_KINDS = (".txt", ".jsonl", ".ndjson", ".parquet")


def local_corpus(path: Path, *, name: str = "text", text_field: str = "text") -> Corpus:
    """Returns the documents of a file, or of a folder of files in the order of their names, as a corpus of a name.

    A .jsonl file holds one document a line, a .parquet file one a row; any other file is one document. Ends .zst and
    .gz name a compressed file. Hidden files of a folder are left out. `text_field` is the field or column of the text.
    Line ends stay as they are. A byte order mark in front of a text is left out, which `Corpus.changes` tells.
    """
    if not path.exists():
        raise UserError.expected(f"text at data_path {str(path)!r}", found="nothing there", remedy="check the path")

    changes: Changes = {}

    def documents() -> Iterator[Document]:
        files = list(_folder_files(path)) if path.is_dir() else [path]
        empty = True
        for file in files:
            base = file.relative_to(path).as_posix() if path.is_dir() else file.name
            for document in without_marks(_file_documents(file, base, text_field), changes):
                empty = False
                yield document
        if empty:
            raise UserError(f"Expected text in data_path {str(path)!r}, found none: give a file or folder with text.")

    return Corpus(name=name, documents=documents, detail=path.name, changes=changes)


def local_pairs(path: Path, first: str, second: str) -> Iterator[tuple[str, str, str]]:
    """Yields file and line, and the texts of two fields, of the objects in a .jsonl file or a folder of them."""
    if not path.exists():
        raise UserError.expected(f"pairs at {str(path)!r}", found="nothing there", remedy="check the path")
    empty = True
    remedy = f'write one {{"{first}": "...", "{second}": "..."}} a line'
    for file in _folder_files(path) if path.is_dir() else [path]:
        base = file.relative_to(path).as_posix() if path.is_dir() else file.name
        for number, line in _lines(file):
            before, behind = (_jsonl_text(line, file, number, field, remedy) for field in (first, second))
            before = before.removeprefix(MARK)
            if not behind:
                where = f"in line {number} of {str(file)!r}"
                raise UserError(f"Expected a {second!r} that is not empty {where}, found one that is: leave it out.")
            empty = False
            yield f"{base}:{number}", before, behind
    if empty:
        raise UserError.expected(f"pairs in {str(path)!r}", found="none", remedy=remedy)


def text_name(path: Path) -> str:
    """Returns the name of a file or folder of text without the endings that say how the text is stored."""
    name = path.name
    for endings in (_COMPRESSIONS, _KINDS):
        ending = Path(name).suffix
        name = name.removesuffix(ending) if ending.lower() in endings else name
    return name


def read_text(path: Path) -> str:
    """Returns a file's text, line ends as they are, without a byte order mark in front of it."""
    text = _decoded(path)
    if text.startswith(MARK):
        logger.info("%s begins with a byte order mark, which is left out", path)
    return text.removeprefix(MARK)


def _decoded(path: Path) -> str:
    raw = bytearray()
    if path.suffix not in _COMPRESSIONS:
        _check_size(path.stat().st_size, path)
    with _open(path) as stream:
        while piece := stream.read(_PIECE_BYTES):
            raw += piece
            _check_size(len(raw), path)
    _check_encoding(raw, path)
    if b"\0" in raw:
        raise UserError(f"Expected text in {str(path)!r}, found a binary file (it holds zero bytes): give a text file.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected UTF-8 text in {str(path)!r}, found byte {raw[error.start]:#04x} at {error.start}: "
            "convert the file to UTF-8."
        ) from None


def _check_encoding(beginning: bytes | bytearray, path: Path) -> None:
    """Refuses a text whose byte order mark is that of another encoding than UTF-8."""
    encoding = next((name for mark, name in _OTHER_MARKS.items() if beginning.startswith(mark)), None)
    if encoding is not None:
        raise UserError(
            f"Expected UTF-8 text in {str(path)!r}, found {encoding} (by its byte order mark): convert it, as by "
            f"`iconv -f {encoding} -t UTF-8`."
        )


def _folder_files(folder: Path) -> Iterator[Path]:
    """Yields a folder's files in the order of their names; hidden ones are a system's or an editor's, not text."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(name.startswith(".") for name in file.relative_to(folder).parts):
            yield file


def _file_documents(file: Path, name: str, text_field: str) -> Iterator[Document]:
    if not file.is_file():  # a FIFO would be waited for, a device read for ever
        raise UserError(f"Expected a file or folder with text at {str(file)!r}, found neither: give a regular file.")
    kind = Path(file.stem).suffix if file.suffix in _COMPRESSIONS else file.suffix
    if kind == ".parquet":
        texts = _parquet_texts(file, text_field)
    elif kind in (".jsonl", ".ndjson"):
        texts = _jsonl_texts(file, text_field)
    else:
        if (text := _decoded(file)).strip():
            yield make_document(name, text)
        return
    for number, text in texts:
        if text.strip():
            yield make_document(f"{name}:{number}", text)


def _jsonl_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    for number, line in _lines(file):
        yield number, _jsonl_text(line, file, number, text_field)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    with _open(file) as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_DOCUMENT_BYTES + 1), b""), start=1):
            _check_size(len(line), file)
            if number == 1:
                _check_encoding(line, file)
            if line.strip():
                yield number, line


def _jsonl_text(line: bytes, file: Path, number: int, text_field: str, remedy: str | None = None) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(
            f"Expected JSON in UTF-8 in line {number} of {str(file)!r}, found something else: write one JSON value a "
            "line."
        ) from None
    text = None
    if isinstance(value, dict):
        text = value.get(text_field)
    elif remedy is None:
        text = value
    remedy = remedy or 'name the field that holds the text with --metadata \'{"text_field": "..."}\''
    if not isinstance(text, str):
        raise UserError(
            f"Expected a string, or an object with a string {text_field!r}, in line {number} of {str(file)!r}, found "
            f"neither: {remedy}."
        )
    if _SURROGATE.search(text):
        raise UserError(
            f"Expected Unicode text in line {number} of {str(file)!r}, found half of a surrogate pair (such as "
            "\\ud83d alone), which no tokenizer takes: mend or leave out that line."
        )
    return text


def _parquet_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    import pyarrow as pa  # a third of a second that only readers of tables take
    import pyarrow.parquet as pq  # as above

    naming = 'name the one that holds the text with --metadata \'{"text_field": "..."}\'.'
    try:
        table = pq.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            raise UserError(
                f"Expected a column {text_field!r} in {str(file)!r}, found {table.schema_arrow.names}: {naming}"
            )
        kind = table.schema_arrow.field(text_field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise UserError(
                f"Expected text in the column {text_field!r} of {str(file)!r}, found values of type {kind}: {naming}"
            )
        batches = table.iter_batches(batch_size=64, columns=[text_field])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for number, text in enumerate(texts, start=1):
            yield number, text or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"Expected a parquet file at {str(file)!r}, found something else ({first_line(error)}): give a file that "
            "parquet readers open."
        ) from None


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if (compression := _COMPRESSIONS.get(path.suffix)) is None:
        try:
            with path.open("rb") as stream:
                yield stream
        except OSError as error:
            raise UserError(
                f"Expected a file that can be read at {str(path)!r}, found that it cannot ({error.strerror}): "
                "check its permissions and its disk."
            ) from error
        return
    import pyarrow as pa  # as above

    try:
        with io.BufferedReader(pa.input_stream(str(path), compression=compression)) as stream:
            yield stream
    except OSError as error:  # pyarrow's own errors of broken data are such too
        raise UserError(
            f"Expected a {compression} file at {str(path)!r}, found something else ({first_line(error)}): "
            "give the file its right ending."
        ) from None


def _check_size(size: int, path: Path) -> None:
    if size > MOST_DOCUMENT_BYTES:
        raise UserError(
            f"Expected documents of at most {MOST_DOCUMENT_BYTES // 2**20} MiB, found a longer one in {str(path)!r}: "
            "split it into several files, lines or rows."
        )
