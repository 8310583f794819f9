"""Corpora: tokenising and cutting windows against a plain loop over the tokenizer, and start-up cold and warm.

    python benchmarks/corpora.py TOKENIZER [--data-path FILE_OR_FOLDER]

Without a path the standard library's sources are read. Throughput is in megabytes of text and millions of tokens a
second; a start-up runs from the source's first byte to the first request's tokens, in a fresh process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sbeval.corpora import (
    Corpus,
    Layout,
    local_corpus,
    resolve_tokens,
    separator_ids,
    stdlib_corpus,
    token_key,
    tokenize_corpus,
)
from sbeval.corpora.windows import disjoint_windows

CONTEXT_LENGTH = 4096


def corpus_at(path: str | None) -> Corpus:
    """Returns the local corpus, or the standard library."""
    return stdlib_corpus() if path is None else local_corpus(Path(path))


def load_tokenizer(name: str) -> object:
    """Returns the Hugging Face tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def plain_loop(corpus: Corpus, tokenizer: object) -> int:
    """Encodes document after document and cuts lists of tokens; returns the number of tokens."""
    stream: list[int] = []
    for document in corpus.documents():
        stream += tokenizer.encode(document.text, verbose=False)  # type: ignore[attr-defined]
        stream.append(tokenizer.eos_token_id)  # type: ignore[attr-defined]
    windows = [stream[start : start + CONTEXT_LENGTH] for start in range(0, len(stream), CONTEXT_LENGTH)]
    return sum(map(len, windows))


def tokenised_windows(corpus: Corpus, tokenizer: object) -> int:
    """Tokenises with the cache and resolves every window by its key; returns the number of tokens."""
    tokens = tokenize_corpus(corpus, tokenizer, Layout(separator_ids(tokenizer, None)))
    stop = tokens.total_tokens // CONTEXT_LENGTH * CONTEXT_LENGTH
    for window in disjoint_windows(0, stop, CONTEXT_LENGTH):
        resolve_tokens(token_key(tokens, window.start, window.stop))
    return tokens.total_tokens


def start(name: str, path: str | None) -> None:
    """Prints the seconds to the first request's tokens, imports and the tokenizer's loading aside."""
    import datasets  # noqa: F401

    tokenizer = load_tokenizer(name)
    began = time.perf_counter()
    tokens = tokenize_corpus(corpus_at(path), tokenizer, Layout(separator_ids(tokenizer, None)))
    resolve_tokens(token_key(tokens, 0, min(CONTEXT_LENGTH, tokens.total_tokens)))
    print(time.perf_counter() - began)


def main() -> None:
    """Prints one line a measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer")
    parser.add_argument("--data-path")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(options.tokenizer, options.data_path)
        return
    tokenizer = load_tokenizer(options.tokenizer)
    megabytes = sum(document.original_bytes for document in corpus_at(options.data_path).documents()) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SBEVAL_CACHE"] = folder
        for name, measure in (("plain loop", plain_loop), ("sbeval, cold", tokenised_windows)):
            began = time.perf_counter()
            tokens = measure(corpus_at(options.data_path), tokenizer)
            seconds = time.perf_counter() - began
            print(f"{name:<14}{megabytes / seconds:8.2f} MB/s{tokens / seconds / 1e6:8.3f} M tokens/s{seconds:8.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"SBEVAL_CACHE": folder}
        command = [sys.executable, __file__, options.tokenizer, "--start"]
        if options.data_path:
            command += ["--data-path", options.data_path]
        for name in ("start-up, cold", "start-up, warm"):
            found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            print(f"{name:<14}{float(found.stdout.split()[-1]):8.2f} s")


if __name__ == "__main__":
    main()
