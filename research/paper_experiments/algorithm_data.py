"""Token arrays that train a model on sequences of `sb_algorithm`, each in a window of its own.

    python -m research.paper_experiments.algorithm_data build/algorithms/copy --algorithms copy
    sbeval train research/paper_experiments/algorithm.yaml --data build/algorithms/copy --out build/runs/copy

A window has 65 tokens, 64 inputs and a last target: a sequence of half the length to the whole length, padded with end
tokens. Several algorithms take turns. Seeds are others than those of the tasks. `sbeval train` also scores the source,
whose random symbols no model can predict.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sbeval.tasks.recall.algorithms import ALGORITHMS, END, VOCABULARY, Algorithm, least_tokens, solved
from sbeval.training.tokenizer import END_OF_TEXT, Tokens, save_tokenizer

TRAINING_SEED = "training"
LENGTH_TOKENS = 64


def window(algorithm: Algorithm, index: int, length_tokens: int) -> Tokens:
    """Returns training window `index` of an algorithm, uint16 [length + 1]."""
    least = max(least_tokens(algorithm), length_tokens // 2 + 1) | 1
    spread = (length_tokens + 1 - least) // 2 + 1
    tokens = least + 2 * (index % spread)
    row = np.full(length_tokens + 1, END, dtype=np.uint16)
    row[:tokens] = solved(algorithm, tokens, TRAINING_SEED, index).tokens_T
    return row


def write_arrays(folder: Path, algorithms: Sequence[Algorithm], windows: int, length_tokens: int) -> None:
    """Writes the arrays, their record and a tokenizer with one word for each token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    chosen = [algorithms[index % len(algorithms)] for index in range(windows)]
    rows = np.stack([window(algorithm, index, length_tokens) for index, algorithm in enumerate(chosen)])
    # the joined text: the one window in a thousand that is no sequence of its own
    tokens = rows[: min(windows, 4096)].flatten()
    np.save(folder / "recall.npy", rows)
    np.save(folder / "tokens.npy", tokens)
    words = {END_OF_TEXT: END, **{f"t{token}": token for token in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(tokenizer, folder / "tokenizer")
    record = {"algorithms": list(algorithms), "windows": windows, "length_tokens": length_tokens}
    record |= {"unique_tokens": int(rows.size), "tokens_sha256": hashlib.sha256(rows.tobytes()).hexdigest()}
    (folder / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the arrays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--windows", type=int, default=262_144)
    parser.add_argument("--length", type=int, default=LENGTH_TOKENS, help="inputs of a window")
    options = parser.parse_args(arguments)
    write_arrays(options.folder, options.algorithms, options.windows, options.length)


if __name__ == "__main__":
    main()
