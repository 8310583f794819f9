"""`python -m research.training_text.tokenised FILE --out DIR`: from the packed training text to token arrays on disk.

The folder holds `tokens.npy` (all documents, each followed by the end-of-text token), `recall.npy` (recall text,
[windows, length + 1]), `tokenizer/` and `record.json`.
"""

import argparse
import hashlib
import json
import lzma
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.training_text.corpus import DOCUMENT_SEPARATOR
from research.training_text.recall_text import RecallWriter
from sbeval.errors import UserError
from sbeval.keeping.writing import is_new, set_aside, written_beside
from sbeval.processes.ending import reporting_errors
from sbeval.training.tokenizer import END_OF_TEXT, Tokens, save_tokenizer, token_dtype

RECALL_BATCH_WINDOWS = 2048
BATCH_DOCUMENTS = 512


def tokenise(
    packed: Path, out: Path, *, length_tokens: int, recall_windows: int, seed: int, replace: bool = False
) -> dict[str, Any]:
    """Unpacks and tokenises the training text.

    Args:
        packed: tar file written by `research.training_text.prepare`.
        out: folder to write.
        length_tokens: training length; recall windows hold one token more.
        recall_windows: number of recall windows to write.
        seed: decides the recall windows.
        replace: where `out` holds anything but the arrays of an earlier call of the same arguments, move that aside.

    Returns:
        The record: that of the packed file, with sizes and hashes of the arrays.

    Raises:
        UserError: the packed file is missing or broken, or `out` holds something else.
    """
    from tokenizers import Tokenizer

    texts, tokenizer_json, record = _unpack(packed)
    packed_sha256 = hashlib.sha256(packed.read_bytes()).hexdigest()
    recall_made = {"windows": recall_windows, "length_tokens": length_tokens, "seed": seed}
    if not is_new(out):
        if (made := _made_before(out, packed_sha256, recall_made)) is not None:
            return made
        if not replace:
            raise UserError(
                f"Expected a folder that is new, empty or holds the token arrays of this text at {out}, found "
                "another: choose another --out, or have what is there moved aside with --replace"
            )
        set_aside(out, reads=[packed])
    tokenizer = Tokenizer.from_str(tokenizer_json)
    separator = tokenizer.token_to_id(END_OF_TEXT)
    if separator is None:
        raise UserError(f"Expected a tokenizer with {END_OF_TEXT} in {packed}, found none; prepare the text again")
    end = np.array([separator], token_dtype(tokenizer.get_vocab_size()))
    tokens = np.concatenate([part for document in encode_all(tokenizer, texts) for part in (document, end)])
    recall = _recall_array(tokenizer, texts, separator, length_tokens + 1, recall_windows, seed)

    record |= {
        "packed_sha256": packed_sha256,
        "unique_tokens": len(tokens),
        "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "recall": recall_made | {"sha256": hashlib.sha256(recall.tobytes()).hexdigest()},
    }
    with written_beside(out) as part:
        np.save(part / "tokens.npy", tokens)
        np.save(part / "recall.npy", recall)
        save_tokenizer(tokenizer, part / "tokenizer")
        (part / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record


def _made_before(out: Path, packed_sha256: str, recall_made: dict[str, int]) -> dict[str, Any] | None:
    """Returns the record of an earlier call's arrays, None where the arrays are others or are no longer whole."""
    try:
        record: dict[str, Any] = json.loads((out / "record.json").read_text(encoding="utf-8"))
        wanted = {"packed_sha256": packed_sha256, "tokens_sha256": _array_sha256(out / "tokens.npy")}
        recall = recall_made | {"sha256": _array_sha256(out / "recall.npy")}
        return record if record == record | wanted | {"recall": recall} else None
    except (OSError, EOFError, ValueError, TypeError):
        return None


def _array_sha256(file: Path) -> str:
    return hashlib.sha256(np.load(file).tobytes()).hexdigest()


def _unpack(packed: Path) -> tuple[list[str], str, dict[str, Any]]:
    try:
        with tarfile.open(packed) as archive:
            parts = {name: archive.extractfile(name) for name in ("documents.xz", "tokenizer.json", "record.json")}
            data = {name: part.read() for name, part in parts.items() if part is not None}
    except (OSError, KeyError, tarfile.TarError) as error:
        raise UserError(
            f"Expected packed training text at {packed}, found: {error}; "
            "make it with `python -m research.training_text.prepare`"
        ) from error
    payload = lzma.decompress(data["documents.xz"])
    record = json.loads(data["record.json"])
    digest = hashlib.sha256(payload).hexdigest()
    if digest != record["text_sha256"]:
        raise UserError(f"Expected text with sha256 {record['text_sha256']} in {packed}, found {digest}; copy it again")
    return payload.decode().split(DOCUMENT_SEPARATOR), data["tokenizer.json"].decode(), record


def _recall_array(
    tokenizer: Any, texts: Sequence[str], separator: int, window_tokens: int, windows: int, seed: int
) -> Tokens:
    if windows == 0:
        return np.empty((0, window_tokens), token_dtype(tokenizer.get_vocab_size()))
    writer = RecallWriter(texts, seed)
    array = np.full((windows, window_tokens), separator, token_dtype(tokenizer.get_vocab_size()))
    for start in range(0, windows, RECALL_BATCH_WINDOWS):
        batch = [writer.window(index) for index in range(start, min(start + RECALL_BATCH_WINDOWS, windows))]
        for row, ids in enumerate(encode_all(tokenizer, batch), start):
            # every second window begins like a document, the others in the middle of one
            first = 1 if row % 2 else 0
            taken = ids[: window_tokens - first]
            array[row, first : first + len(taken)] = taken
    return array


def encode_all(tokenizer: Any, texts: Sequence[str]) -> Iterator[Tokens]:
    """Yields each text's token ids, computed in batches on all cores; `<|endoftext|>` inside a text is plain text."""
    dtype = token_dtype(tokenizer.get_vocab_size())
    tokenizer.encode_special_tokens = True
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH_DOCUMENTS], add_special_tokens=False):
            yield np.asarray(encoding.ids, dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the tokenisation."""
    parser = argparse.ArgumentParser(prog="python -m research.training_text.tokenised", description=__doc__)
    parser.add_argument("packed", type=Path, help="file written by python -m research.training_text.prepare")
    parser.add_argument("--out", type=Path, required=True, help="folder for the arrays")
    parser.add_argument("--length", type=int, default=1024, help="training length in tokens")
    parser.add_argument("--recall-windows", type=int, default=32768, help="number of recall windows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the recall windows")
    parser.add_argument("--replace", action="store_true", help="move what else the folder holds to NAME.old-TIME")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    record = tokenise(
        options.packed,
        options.out,
        length_tokens=options.length,
        recall_windows=options.recall_windows,
        seed=options.seed,
        replace=options.replace,
    )
    seconds = time.perf_counter() - started
    print(f"{options.out}: {record['unique_tokens']} tokens, {options.recall_windows} recall windows, {seconds:.0f} s")


if __name__ == "__main__":
    with reporting_errors():
        main()
