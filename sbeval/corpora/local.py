"""Reads documents from local files: .txt, .jsonl and .parquet, plain or compressed with zstd or gzip, or a folder.

Files are streamed: memory holds one document, not the whole corpus.
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
_CHUNK_BYTES = 2**20
_COMPRESSIONS = {".zst": "zstd", ".gz": "gzip"}
# UTF-32 comes first, because its little-endian byte order mark begins with that of UTF-16
_OTHER_MARKS = {
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "UTF-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "UTF-16"),
}
_KINDS = (".txt", ".jsonl", ".ndjson", ".parquet")


def check_exists(path: Path) -> None:
    """Checks that there is a file or folder at the option `data_path`.

    Raises:
        UserError: nothing is there.
    """
    if not path.exists():
        raise UserError.expected(f"text at data_path {str(path)!r}", found="nothing there", remedy="check the path")


def local_corpus(path: Path, *, name: str = "text", text_field: str = "text") -> Corpus:
    """Returns the documents of a file, or of a folder's files in order of their names, as a corpus.

    A .jsonl file holds one document a line, a .parquet file one a row; any other file is one document. Files may be
    compressed (.zst, .gz). Hidden files of a folder are skipped. Line ends are kept. A byte order mark at the
    start of a text is removed and noted in `Corpus.changes`.

    Args:
        path: file or folder.
        name: name of the corpus.
        text_field: field or column that holds the text.

    Raises:
        UserError: nothing is at `path`. Reading the documents raises it too: for files that cannot be read or decoded,
            and if there is no text at all.
    """
    check_exists(path)
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
            raise UserError(f"data_path {str(path)!r} holds no text: give a file or folder with text.")

    return Corpus(name=name, documents=documents, detail=path.name, changes=changes)


def local_pairs(path: Path, first: str, second: str) -> Iterator[tuple[str, str, str]]:
    """Reads pairs of texts from a .jsonl file or a folder of them.

    Yields:
        "FILE:LINE", and the texts of the fields `first` and `second`.

    Raises:
        UserError: there are no pairs, a line has no such fields, or `second` is empty.
    """
    if not path.exists():
        raise UserError(f"The pairs' file or folder {str(path)!r} does not exist: check the path.")
    empty, remedy = True, f'write one {{"{first}": "...", "{second}": "..."}} a line'
    for file in _folder_files(path) if path.is_dir() else [path]:
        base = file.relative_to(path).as_posix() if path.is_dir() else file.name
        for number, line in _lines(file):
            first_text = _jsonl_text(line, file, number, first, remedy).removeprefix(MARK)
            second_text = _jsonl_text(line, file, number, second, remedy)
            if not second_text:
                raise UserError(f"{second!r} is empty in line {number} of {str(file)!r}: remove the line.")
            empty = False
            yield f"{base}:{number}", first_text, second_text
    if empty:
        raise UserError(f"{str(path)!r} holds no pairs: {remedy}.")


def text_name(path: Path) -> str:
    """Returns the name of a file or folder without suffixes such as .jsonl and .zst."""
    name = path.name
    for endings in (_COMPRESSIONS, _KINDS):
        ending = Path(name).suffix
        name = name.removesuffix(ending) if ending.lower() in endings else name
    return name


def read_text(path: Path) -> str:
    """Reads a file's text; line ends are kept, a byte order mark at the start is removed."""
    text = _decoded(path)
    if text.startswith(MARK):
        logger.info("the byte order mark at the start of %s was removed", path)
    return text.removeprefix(MARK)


def _decoded(path: Path) -> str:
    raw = bytearray()
    if path.suffix not in _COMPRESSIONS:
        _check_size(path.stat().st_size, path)
    with _open(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            raw += chunk
            _check_size(len(raw), path)
    _check_encoding(raw, path)
    if b"\0" in raw:
        raise UserError(f"{str(path)!r} is a binary file (it contains zero bytes): give a text file.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not valid UTF-8 (byte {raw[error.start]:#04x} at {error.start}): "
            "convert the file to UTF-8."
        ) from None


def _check_encoding(beginning: bytes | bytearray, path: Path) -> None:
    """Refuses a text that starts with the byte order mark of UTF-16 or UTF-32."""
    encoding = next((name for mark, name in _OTHER_MARKS.items() if beginning.startswith(mark)), None)
    if encoding is not None:
        raise UserError(
            f"{str(path)!r} is encoded in {encoding}, by its byte order mark: convert it to UTF-8, for example with "
            f"`iconv -f {encoding} -t UTF-8`."
        )


def _folder_files(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder in order of their names, without hidden files."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(name.startswith(".") for name in file.relative_to(folder).parts):
            yield file


def _file_documents(file: Path, name: str, text_field: str) -> Iterator[Document]:
    if not file.is_file():  # reading a FIFO would block, a device might never end
        raise UserError(f"{str(file)!r} is neither a regular file nor a folder: give a file or folder with text.")
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
            f"Line {number} of {str(file)!r} is not valid JSON in UTF-8: write one JSON value on each line."
        ) from None
    text = value.get(text_field) if isinstance(value, dict) else value if remedy is None else None
    required = f"an object with a string in {text_field!r}"
    if remedy is None:
        required = f"a string or {required}"
    remedy = remedy or 'name the field that holds the text with --metadata \'{"text_field": "..."}\''
    if not isinstance(text, str):
        raise UserError(f"Line {number} of {str(file)!r} is not {required}: {remedy}.")
    if _SURROGATE.search(text):
        raise UserError(
            f"Line {number} of {str(file)!r} contains half of a surrogate pair (such as \\ud83d on its own), which "
            "tokenizers cannot encode: correct or remove the line."
        )
    return text


def _parquet_texts(file: Path, text_field: str) -> Iterator[tuple[int, str]]:
    import pyarrow as pa  # slow import that only parquet files need
    import pyarrow.parquet as pq  # slow import that only parquet files need

    naming = 'name the column that holds the text with --metadata \'{"text_field": "..."}\'.'
    try:
        table = pq.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            raise UserError(f"{str(file)!r} has no column {text_field!r}, only {table.schema_arrow.names}: {naming}")
        kind = table.schema_arrow.field(text_field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise UserError(
                f"The column {text_field!r} of {str(file)!r} holds values of type {kind}, not text: {naming}"
            )
        batches = table.iter_batches(batch_size=64, columns=[text_field])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for number, text in enumerate(texts, start=1):
            yield number, text or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{str(file)!r} cannot be read as a parquet file ({first_line(error)}): give an intact parquet file, or "
            "the right suffix."
        ) from None


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if (compression := _COMPRESSIONS.get(path.suffix)) is None:
        try:
            with path.open("rb") as stream:
                yield stream
        except OSError as error:
            raise UserError(
                f"{str(path)!r} cannot be read ({error.strerror}): check its permissions and its disk."
            ) from error
        return
    import pyarrow as pa  # slow import that only compressed files need

    try:
        with io.BufferedReader(pa.input_stream(str(path), compression=compression)) as stream:
            yield stream
    except OSError as error:  # pyarrow raises it for damaged data too
        raise UserError(
            f"{str(path)!r} cannot be read as a {compression} file ({first_line(error)}): give an intact file, or the "
            "right suffix."
        ) from None


def _check_size(size: int, path: Path) -> None:
    if size > MOST_DOCUMENT_BYTES:
        raise UserError(
            f"A document in {str(path)!r} is longer than {MOST_DOCUMENT_BYTES // 2**20} MiB: split it into several "
            "files, lines or rows."
        )
