"""`python -m research.training_text.prepare RECIPE --out FILE`: from pinned packages to a file of training text.

The file is a tar of `documents.xz` (the texts, separated by NUL), `tokenizer.json` and `record.json`. Text compresses
better than packed token ids, and tokenising it again takes seconds.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import platform
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from research.training_text.corpus import DOCUMENT_SEPARATOR, SourceFile, collect, download
from research.training_text.decontamination import SPAN_TOKENS, SpanIndex, near_duplicates
from research.training_text.tokenised import encode_all
from sbeval.corpora.sources import stdlib_corpus
from sbeval.errors import UserError
from sbeval.foreign_files import read_yaml
from sbeval.keeping.writing import set_aside, whole_file
from sbeval.processes.ending import reporting_errors
from sbeval.settings import Count, Names, Number, Settings
from sbeval.training.tokenizer import Tokens, train_tokenizer

_TOKENIZER_SAMPLE = 6


class DataRecipe(Settings):
    """The sources of the training text."""

    packages: Names = Field(description="`name==version` of each package.")
    package_bytes_max: Count = Field(description="At most this much source text of one package.")
    vocabulary: Count = Field(default=4096, description="Entries of the tokenizer.")
    near_duplicate_share: Number = Field(
        default=0.5, description="A file is dropped when more than this share of its spans occurred in earlier files."
    )


def prepare(
    recipe: DataRecipe, wheels: Path, stdlib_folders: Sequence[Path | None], out: Path, *, replace: bool = False
) -> dict[str, Any]:
    """Downloads, filters, decontaminates and packs the training text.

    Args:
        recipe: what to take.
        wheels: folder of downloaded wheels.
        stdlib_folders: standard libraries to hold out; None is the running interpreter's.
        out: the tar file to write.
        replace: where something stands there, move that aside.

    Returns:
        The record, also written into the tar.

    Raises:
        UserError: nothing is left after the filters, or something stands at `out`.
    """
    if os.path.lexists(out) and not replace:
        raise UserError(
            f"Expected a new file at {out}, found one that is there: choose another --out, or have it moved aside with "
            "--replace"
        )
    packages = download(recipe.packages, wheels)
    documents = collect(packages, recipe.package_bytes_max)
    print(f"{len(documents)} files, {_megabytes(documents):.1f} MB from {len(packages)} packages", flush=True)

    tokenizer = train_tokenizer((document.text for document in documents[::_TOKENIZER_SAMPLE]), recipe.vocabulary)
    tokens = list(encode_all(tokenizer, [document.text for document in documents]))
    print(f"{sum(map(len, tokens))} tokens", flush=True)

    duplicates = near_duplicates(tokens, recipe.near_duplicate_share)
    held_out = [document.text for folder in stdlib_folders for document in stdlib_corpus(folder).documents()]
    held_out_tokens = list(encode_all(tokenizer, held_out))
    index = SpanIndex(held_out_tokens)
    shared = np.array([index.shared_spans(document) for document in tokens])
    keep = ~duplicates & (shared == 0)
    kept = [document for document, stays in zip(documents, keep, strict=True) if stays]
    kept_tokens = [document for document, stays in zip(tokens, keep, strict=True) if stays]
    if not kept:
        raise UserError("no training file is left after the filters: name more packages in the data recipe")

    left_out = (
        f"{int(duplicates.sum())} near duplicates and {int((shared > 0).sum())} that share a span with held-out text"
    )
    print(f"{len(kept)} files kept, left out: {left_out}; compressing takes minutes", flush=True)
    payload = DOCUMENT_SEPARATOR.join(document.text for document in kept).encode()
    record: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "packages": [{"requirement": package.requirement, "wheel_sha256": package.sha256} for package in packages],
        "python": platform.python_version(),
        "files_collected": len(documents),
        "tokens_collected": sum(map(len, tokens)),
        "near_duplicates_dropped": _count(tokens, duplicates),
        "held_out": {
            "what": "Python standard library: " + ", ".join(_library_name(folder) for folder in stdlib_folders),
            "files": len(held_out),
            "tokens": sum(map(len, held_out_tokens)),
            "span_tokens": SPAN_TOKENS,
            "distinct_spans": len(index),
            "sharing_files_dropped": _count(tokens, ~duplicates & (shared > 0)),
            "before": _overlap(held_out_tokens, [tokens[i] for i in np.flatnonzero(~duplicates)], index),
            "after": _overlap(held_out_tokens, kept_tokens, index),
        },
        "files": len(kept),
        "text_bytes": len(payload),
        "text_sha256": hashlib.sha256(payload).hexdigest(),
        "unique_tokens": sum(map(len, kept_tokens)) + len(kept_tokens),
    }
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 << 20}]
    compressed = lzma.compress(payload, format=lzma.FORMAT_XZ, filters=filters)
    if os.path.lexists(out):
        set_aside(out, reads=[wheels, *filter(None, stdlib_folders)])
    with whole_file(out, "training text", remedy="choose another --out") as part, tarfile.open(part, "w") as archive:
        for name, data in (
            ("documents.xz", compressed),
            ("tokenizer.json", tokenizer.to_str().encode()),
            ("record.json", json.dumps(record, indent=1).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, {record['unique_tokens']} unique tokens", flush=True)
    return record


def _overlap(held_out: Sequence[Tokens], training: Sequence[Tokens], held_out_index: SpanIndex) -> dict[str, Any]:
    """States the overlap from both sides: training files that share a span, and held-out spans found in training."""
    shared = np.array([held_out_index.shared_spans(tokens) for tokens in training])
    index = SpanIndex(training)
    spans = sum(max(0, len(tokens) - SPAN_TOKENS + 1) for tokens in held_out)
    found = sum(index.shared_spans(tokens) for tokens in held_out)
    return {
        "training_files_sharing_a_span": int((shared > 0).sum()),
        "training_spans_shared": int(shared.sum()),
        "held_out_spans_found_in_training": found,
        "share_of_held_out_spans": found / spans if spans else 0.0,
    }


def _count(tokens: Sequence[Tokens], chosen: NDArray[np.bool_]) -> dict[str, int]:
    return {
        "files": int(chosen.sum()),
        "tokens": sum(len(document) for document, is_chosen in zip(tokens, chosen, strict=True) if is_chosen),
    }


def _megabytes(documents: Sequence[SourceFile]) -> float:
    return sum(len(document.text) for document in documents) / 1e6


def _library_name(folder: Path | None) -> str:
    return f"Python {platform.python_version()}" if folder is None else folder.name


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the preparation."""
    parser = argparse.ArgumentParser(prog="python -m research.training_text.prepare", description=__doc__)
    parser.add_argument("recipe", type=Path, help="data recipe, for instance research/training_text/demo_data.yaml")
    parser.add_argument("--out", type=Path, required=True, help="tar file to write")
    parser.add_argument("--wheels", type=Path, default=Path("build/wheels"), help="folder of downloaded wheels")
    parser.add_argument(
        "--stdlib", type=Path, action="append", default=[], help="further standard libraries to hold out"
    )
    parser.add_argument("--replace", action="store_true", help="move what stands at --out to NAME.old-TIME")
    options = parser.parse_args(arguments)
    recipe = DataRecipe.read(read_yaml(options.recipe, "a recipe"), place="the recipe", source=options.recipe.name)
    prepare(recipe, options.wheels, [None, *options.stdlib], options.out, replace=options.replace)


if __name__ == "__main__":
    with reporting_errors():
        main()
