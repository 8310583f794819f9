"""Texts of users: damaged .txt, .jsonl and .parquet files, folders of them, and token arrays of a training.

The number is the tokens that a model would read. It is named as changed by the hash of the corpus, which a results file
records, or by the hashes of the arrays, which a training run is known by.
"""

import gzip
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sbeval.corpora import corpus_sha256, local_corpus
from sbeval.corpora.encode import encode_documents
from sbeval.corpora.tokens import Layout
from sbeval.training.arrays import arrays_parts, load_arrays
from sbeval.training.windows import TrainingWindows
from tests.fuzz.checkpoints import small_tokenizer
from tests.fuzz.mutations import changed_bytes, damage, put_in_place_of
from tests.fuzz.outcomes import Silent

NAMES = ["text", "jsonl", "parquet", "gzip", "folder", "arrays"]
WORDS = [
    "now is better than never",
    "the hat, the bone and the owl",
    "i\u00efsland \U0001f600 \r\n line",
    "a b c " * 30,
]
ODD_TEXTS: tuple[Any, ...] = (
    *("", " ", "\n\n", "\r", "\ufeff", "\0", "a\0b", "\x85\u2028", "\u0663\u00b2", "<s></s><pad>"),
    *("\N{COMBINING ACUTE ACCENT}" * 99, None, 1, 1.5, True, ["x"], {"text": "x"}, "\ud83d", "x" * 10_000),
)


def _write(kind: str, folder: Path, texts: list[Any], rng: Random | None) -> Path:
    """Writes a corpus; with a generator its texts are changed first."""
    if rng is not None and rng.random() < 0.5:
        texts = list(texts)
        texts[rng.randrange(len(texts))] = rng.choice(ODD_TEXTS)
    name = "text" if rng is None or rng.random() < 0.9 else rng.choice(["", "body", "Text"])
    file = folder / {"jsonl": "a.jsonl", "parquet": "a.parquet", "gzip": "a.txt.gz"}.get(kind, "a.txt")
    if kind == "jsonl":
        file.write_text("".join(json.dumps({name: text}) + "\n" for text in texts), encoding="utf-8")
    elif kind == "parquet":
        kept = [text if isinstance(text, str) and text.isprintable() else None for text in texts]
        column = rng.choice([kept, kept, kept, [1, 2, 3, 4], [["x"]] * 4, [b"\xff"] * 4, [None] * 4]) if rng else kept
        pq.write_table(pa.table({name: column}), file)
    elif kind == "gzip":
        file.write_bytes(gzip.compress("\n".join(map(str, texts)).encode(errors="surrogatepass"), mtime=0))
    else:
        file.write_bytes("\n".join(map(str, texts)).encode(errors="surrogatepass"))
    return file


def _read(path: Path) -> tuple[str, list[Any]]:
    """Returns the corpus's hash and its tokens."""
    corpus = local_corpus(path)
    documents = encode_documents(list(corpus.documents()), small_tokenizer(53), Layout(separator=(1,)))
    return corpus_sha256(corpus), [
        [value.tolist() if hasattr(value, "tolist") else value for value in document] for document in documents
    ]


def fuzz(what: str, rng: Random, folder: Path) -> str:
    if what == "arrays":
        return _fuzz_arrays(rng, folder)
    (folder / "before").mkdir()
    (folder / "after").mkdir()
    before = _read(_write(what, folder / "before", WORDS, None))
    file = _write(what, folder / "after", WORDS, rng)
    draw = rng.random()
    if draw < 0.5:
        file.write_bytes(changed_bytes(file.read_bytes(), rng))
    elif draw < 0.6:
        put_in_place_of(file, rng)
    elif draw < 0.7:
        file = file.rename(file.with_suffix(rng.choice([".jsonl", ".parquet", ".gz", ".zst", ".txt", ".bin", ""])))
    if what == "folder":
        (folder / "after" / "b.txt").write_text("more", encoding="utf-8")
        file = folder / "after"
    after = _read(file)
    if after[1] == before[1]:
        return "equal"
    if after[0] == before[0]:
        raise Silent(f"{file}: other tokens of the same hash")
    return "named"


def _fuzz_arrays(rng: Random, folder: Path) -> str:
    source = folder / "before"
    source.mkdir()
    np.save(source / "tokens.npy", np.arange(4000, dtype=np.uint16) % 50)
    np.save(source / "recall.npy", np.arange(330, dtype=np.uint16).reshape(10, 33) % 50)
    (source / "record.json").write_text(json.dumps({"tokens_sha256": "0" * 64, "unique_tokens": 4000}))
    before, named = _windows(source), arrays_parts(source)
    copy = shutil.copytree(source, folder / "after")
    file = copy / rng.choice(["tokens.npy", "recall.npy", "record.json"])
    draw = rng.random()
    if file.suffix == ".json":
        damage(file, rng)
    elif draw < 0.6:
        file.write_bytes(changed_bytes(file.read_bytes(), rng))
    elif draw < 0.8:
        shapes: list[Any] = [
            np.zeros((3, 3)),
            np.array(["x"]),
            np.array([object()]),
            np.zeros(0),
            np.zeros((2, 2, 2), int),
        ]
        np.save(file, rng.choice(shapes), allow_pickle=True)
    else:
        put_in_place_of(file, rng)
    if _windows(copy) == before:
        return "equal"
    if arrays_parts(copy) == named:
        raise Silent(f"{file}: other windows of the same parts")
    return "named"


def _windows(folder: Path) -> list[Any]:
    arrays = load_arrays(folder)
    windows = TrainingWindows(arrays.tokens, arrays.recall, length_tokens=32, windows=8, recall_share=0.25, seed=1)
    return [windows[index].tolist() for index in range(8)]
