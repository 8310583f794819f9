"""Corpora: tokenising and cutting windows against a plain loop over the tokenizer, start-up, and memory.

    python benchmarks/corpora.py TOKENIZER [--data-path FILE_OR_FOLDER] [--wikitext] [--repetitions 5]
    python benchmarks/corpora.py --memory [--gigabytes 0.2 1]

Without a path the standard library's sources are read; --wikitext reads the path as wikitext's raw text. Throughput is
in megabytes of text a second, once by the clock and once by the processor time of all threads, which other work on the
machine does not change. A start-up is timed in a fresh process from the moment the task is given its configuration,
imports and tokenizer aside, to the tokens of its first request: cold with an empty cache, warm after that. Every number
is the median of the repetitions, which take turns.

--memory generates corpora of these sizes, takes each through a task in a process of its own, and prints the most memory
that process held (`resource.getrusage`) when the tokens were on disk and when every window had been read. Both count
the pages of memory-mapped files, which the system takes back when it needs them; the most memory without them, sampled
while the process ran, stands beside.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbeval.corpora import Corpus, Layout, local_corpus, resolve_tokens, separator_ids, stdlib_corpus, tokenize_corpus
from sbeval.corpora.windows import disjoint_windows

CONTEXT_LENGTH = 4096
WORD_LETTERS = 24
DOCUMENT_WORDS = 20_000


def load_tokenizer(name: str) -> Any:
    """Returns the Hugging Face tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def plain_loop(corpus: Corpus, tokenizer: Any) -> int:
    """Encodes document after document and cuts lists of tokens; returns the number of tokens."""
    stream: list[int] = []
    for document in corpus.documents():
        stream += tokenizer.encode(document.text, verbose=False)
        stream.append(tokenizer.eos_token_id)
    windows = [stream[start : start + CONTEXT_LENGTH] for start in range(0, len(stream), CONTEXT_LENGTH)]
    return sum(map(len, windows))


def tokenised_windows(corpus: Corpus, tokenizer: Any) -> int:
    """Tokenises into an empty cache and reads every window back; returns the number of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SBEVAL_CACHE"] = folder
        tokens = tokenize_corpus(corpus, tokenizer, Layout(separator_ids(tokenizer, None)))
        for window in disjoint_windows(0, tokens.total_tokens // CONTEXT_LENGTH * CONTEXT_LENGTH, CONTEXT_LENGTH):
            tokens.tokens(window.start, window.stop)
    return tokens.total_tokens


def throughput(path: Path | None, tokenizer: Any, repetitions: int) -> None:
    """Prints megabytes a second of both ways, turn by turn."""
    corpus = stdlib_corpus() if path is None else local_corpus(path)
    megabytes = sum(document.original_bytes for document in corpus.documents()) / 1e6
    ways: dict[str, Callable[[Corpus, Any], int]] = {"plain loop": plain_loop, "sbeval, cold": tokenised_windows}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions):
        for name, measure in ways.items():
            # corpora are told apart by their text, and open ones are kept: every turn needs another text
            turn = Corpus(name="turn", documents=lambda turn=repetition: _marked(corpus, turn))  # type: ignore[misc]
            began, used = time.perf_counter(), time.process_time()
            measure(turn, tokenizer)
            wall[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - used)
    for name in ways:
        by_clock, by_processor = statistics.median(wall[name]), statistics.median(processor[name])
        print(
            f"{name:<16}{megabytes / by_clock:8.2f} MB/s by the clock{megabytes / by_processor:8.2f} MB/s of processor "
            f"time   median of {repetitions}, {megabytes:.1f} MB"
        )


def _marked(corpus: Corpus, turn: int) -> Any:
    for number, document in enumerate(corpus.documents()):
        yield document._replace(name=f"{turn} {document.name}") if number == 0 else document


def start(name: str, path: str | None, wikitext: bool) -> None:
    """Prints the seconds from a task's configuration to its first request's tokens."""
    from sbeval.tasks.perplexity.stream import Stream

    corpus = "wikitext" if wikitext else "stdlib" if path is None else "text"
    metadata = {"tokenizer": load_tokenizer(name), "data_path": path, "context_lengths": [CONTEXT_LENGTH]}
    began = time.perf_counter()
    _first_request(Stream({"task": "start", "dataset_path": "x", "dataset_name": corpus, "metadata": metadata}))
    print(time.perf_counter() - began)


def _first_request(task: Any) -> None:
    block = task.dataset["test"][0]
    (instance, *_) = task.construct_requests(block, "", metadata=("start", 0, 1))
    resolve_tokens(instance.args[0])


def start_up(arguments: argparse.Namespace) -> None:
    """Prints the seconds of cold and of warm starts."""
    command = [sys.executable, __file__, arguments.tokenizer, "--start"]
    command += ["--data-path", str(arguments.data_path)] if arguments.data_path else []
    command += ["--wikitext"] if arguments.wikitext else []
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(arguments.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            for found in seconds.values():
                found.append(float(_child(command, folder).split()[-1]))
    for kind, found in seconds.items():
        print(f"start-up, {kind}{statistics.median(found):8.2f} s   median of {len(found)}")


def memory(gigabytes: list[float]) -> None:
    """Prints the peak memory of a task over a corpus of each size."""
    for size in gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder) / "corpus.jsonl", int(size * 1e9))
            began = time.perf_counter()
            found = json.loads(_child([sys.executable, __file__, "--memory-of", folder], folder).splitlines()[-1])
            print(
                f"{size:5.1f} GB of text, {found['tokens'] / 1e6:.1f} M tokens: {found['tokenised']:.0f} MiB when "
                f"tokenised, {found['read']:.0f} MiB when read; without mapped files {found['anonymous']:.0f} MiB at "
                f"most   {time.perf_counter() - began:.0f} s"
            )


def generate(path: Path, size_bytes: int) -> None:
    """Writes a .jsonl corpus of random words, documents of half a megabyte each."""
    random.seed(0)
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=WORD_LETTERS - 1)) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size_bytes:
            file.write(json.dumps(" ".join(random.choices(words, k=DOCUMENT_WORDS))) + "\n")


def memory_of(folder: Path) -> None:
    """Runs a task on a generated corpus and prints the peak memory of this process, in MiB."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from sbeval.tasks.perplexity.stream import Stream

    anonymous = [0.0]
    threading.Thread(target=_sample_anonymous_mib, args=(anonymous,), daemon=True).start()
    with (folder / "corpus.jsonl").open(encoding="utf-8") as file:
        words = sorted(set(json.loads(file.readline()).split()))
    vocabulary = {word: index for index, word in enumerate(["</s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    metadata = {
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"),
        "data_path": str(folder / "corpus.jsonl"),
        "context_lengths": [CONTEXT_LENGTH],
    }
    task = Stream({"task": "memory", "dataset_path": "x", "dataset_name": "text", "metadata": metadata})
    tokenised = _peak_mib()
    for block in task.dataset["test"]:
        for window in task.windows(block, CONTEXT_LENGTH):
            int(task.corpus.tokens(window.start, window.stop).sum())
    found = {"tokens": task.corpus.total_tokens, "tokenised": tokenised, "read": _peak_mib()}
    print(json.dumps(found | {"anonymous": anonymous[0]}))


def _sample_anonymous_mib(most: list[float]) -> None:
    while True:
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        now = next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024
        most[0] = max(most[0], now)
        time.sleep(0.02)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _child(command: list[str], cache: str) -> str:
    environment = os.environ | {"SBEVAL_CACHE": f"{cache}/cache"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    """Prints one line a measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", nargs="?")
    parser.add_argument("--data-path", type=Path)
    parser.add_argument("--wikitext", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.2, 1.0])
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        memory_of(arguments.memory_of)
    elif arguments.start:
        start(arguments.tokenizer, arguments.data_path and str(arguments.data_path), arguments.wikitext)
    elif arguments.memory:
        memory(arguments.gigabytes)
    elif arguments.tokenizer is None:
        parser.error("expected a tokenizer, or --memory")
    else:
        throughput(arguments.data_path, load_tokenizer(arguments.tokenizer), arguments.repetitions)
        start_up(arguments)


if __name__ == "__main__":
    main()
