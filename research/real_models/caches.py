"""Loss of quantized KV caches by context length, with one prefill for all caches.

    python -m research.real_models.caches real/smollm2 real/texts/modules.jsonl.gz real/caches.jsonl
    python -m research.real_models.caches real/smollm2 real/texts/modules.jsonl.gz real/caches.jsonl --table

The scores are those of `sbeval run` in `fixed_target` with `cache=...`. The prefill of the context does not depend on
the cache, since a quantized cache returns its first keys and values as they are. So the context is read once, and its
keys and values are stored in every cache. `tests/research/test_caches.py` compares both.

Each line of the output is one document, length and cache. Lines that are already there are not computed again, so that
an interrupted run goes on, and two processes share the documents with `--part 1/2` and `--part 2/2`.
"""

import argparse
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from research.png import write_png
from sbeval.caches.build import CacheBuilder
from sbeval.caches.choice import parse_cache
from sbeval.corpora.tokenizers import prefix_token_id
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import SCORE_TOOLTIP, length_figure
from sbeval.reports.figures.theme import series_looks
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import LENGTH
from sbeval.scoring.body import cache_argument

FULL = "full"
Key = tuple[str, int, str]


@torch.no_grad()
def nats_by_cache(model: Any, inputs_1L: Tensor, targets_T: Tensor, caches: Sequence[CacheBuilder]) -> dict[str, float]:
    """Returns the summed NLL of the targets behind the last T inputs, by the name of the cache, "full" without one."""
    context = inputs_1L.shape[1] - len(targets_T)
    name = cache_argument(model)
    full = DynamicCache(config=model.config)
    model.model(input_ids=inputs_1L[:, :context], **{name: full}, use_cache=True)

    def nats(cache: Any, chunk_tokens: int) -> float:
        total = 0.0
        for begin in range(0, len(targets_T), chunk_tokens):
            chunk = slice(begin, begin + chunk_tokens)
            inputs = inputs_1L[:, context:][:, chunk]
            logits_TV = model(input_ids=inputs, **{name: cache}, use_cache=True).logits[0].double()
            total -= float(logits_TV.log_softmax(-1).gather(1, targets_T[chunk, None]).sum())
        return total

    sums = {}
    for builder in caches:
        cache = builder.make(inputs_1L.shape[1])
        for index, layer in enumerate(full.layers):
            cache.update(layer.keys, layer.values, index)
        sums[str(builder.choice)] = nats(cache, builder.chunk_tokens or len(targets_T))
    return {FULL: nats(full, len(targets_T)), **sums}


def documents(file: Path) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of gzipped JSON lines."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            yield document["name"], document["text"]


def read(output: Path) -> dict[Key, float]:
    """Returns the NLL per target of all finished lines by document, length and cache."""
    lines = map(json.loads, output.read_text().splitlines()) if output.exists() else ()
    return {(line["document"], line["length"], line["cache"]): line["nats"] / line["targets"] for line in lines}


def measure(options: argparse.Namespace) -> None:
    """Scores every document at every length, shortest length first, and appends the sums to the output."""
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    builders = [CacheBuilder.of(model, parse_cache(name)) for name in options.caches]
    texts = []
    for name, text in documents(options.texts):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= options.room:
            texts.append((name, tokens[: options.room]))
    part, parts = map(int, options.part.split("/"))
    chosen = texts[: options.documents][part - 1 :: parts]
    for length in options.lengths:
        for name, tokens in chosen:
            if all((name, length, cache) in read(options.output) for cache in (FULL, *options.caches)):
                continue
            window = torch.tensor([prefix_token_id(tokenizer), *tokens[-length:]])
            targets = window[-options.targets :]
            sums = nats_by_cache(model, window[None, :-1], targets, builders)
            with options.output.open("a") as file:
                for cache, nats in sums.items():
                    line = {"document": name, "length": length, "cache": cache, "nats": nats, "targets": len(targets)}
                    file.write(json.dumps(line) + "\n")


def differences(nll: dict[Key, float]) -> pd.DataFrame:
    """Returns paired differences to the full cache by cache and length, with bands simultaneous over lengths.

    The row with length 0 is the difference at the last length minus that at the first. Only documents that have all
    caches at all lengths of the full cache count; a cache may lack lengths.
    """
    lengths = sorted({length for _, length, _ in nll})
    caches = [cache for cache in dict.fromkeys(cache for _, _, cache in nll) if cache != FULL]
    of_cache = {
        cache: [length for length in lengths if any(key[1:] == (length, cache) for key in nll)] for cache in caches
    }
    needed = [(length, cache) for cache, measured in of_cache.items() for length in measured]
    needed += [(length, FULL) for length in lengths]
    names = [name for name in dict.fromkeys(name for name, _, _ in nll) if all((name, *each) in nll for each in needed)]
    rows = []
    for cache, measured in of_cache.items():
        full_CK, found_CK = (
            np.array([[nll[name, length, each] for length in measured] for name in names]) for each in (FULL, cache)
        )
        differences_CK = found_CK - full_CK
        growth_C1 = differences_CK[:, -1:] - differences_CK[:, :1]
        band = simultaneous_band(np.concatenate([differences_CK, growth_C1], axis=1), np.ones(len(names)))
        for length, (value, low, high) in zip([*measured, 0], band, strict=True):
            row = {"setting": cache, LENGTH: length, "value": value, "ci95_low": low, "ci95_high": high}
            rows.append({**row, "clusters": len(names)})
    full_K = [float(np.mean([nll[name, length, FULL] for name in names])) for length in lengths]
    for length, value in zip(lengths, full_K, strict=True):
        row = {"setting": FULL, LENGTH: length, "value": value, "ci95_low": math.nan, "ci95_high": math.nan}
        rows.append({**row, "clusters": len(names)})
    return pd.DataFrame(rows)


def print_table(table: pd.DataFrame) -> None:
    """Prints the differences as Markdown; the first row is the NLL with the full cache."""
    lengths = sorted({*table[LENGTH]} - {0})
    print(f"{table['clusters'].max()} documents\n")
    print("| cache |" + "".join(f" {length_text(length)} |" for length in lengths) + " last minus first |")
    print("| --- |" + " ---: |" * (len(lengths) + 1))
    for cache in [FULL, *(name for name in dict.fromkeys(table["setting"]) if name != FULL)]:
        cells = []
        for length in [*lengths, 0]:
            found = table[(table["setting"] == cache) & (table[LENGTH] == length)]
            cells.append("" if found.empty else _cell(found.iloc[0], cache == FULL))
        print(f"| {cache} |" + "".join(f" {cell} |" for cell in cells))


def _cell(row: Any, is_level: bool) -> str:
    if is_level or math.isnan(row["ci95_low"]):
        return format(row["value"], ".4f" if is_level else "+.4f")
    return f"{row['value']:+.4f} [{row['ci95_low']:+.4f}, {row['ci95_high']:+.4f}]"


def draw(table: pd.DataFrame, file: Path) -> None:
    """Writes the figure of the differences as PNG."""
    shown = table[(table["setting"] != FULL) & (table[LENGTH] > 0)]
    ends = shown[["value", "ci95_low", "ci95_high"]]
    title = "SmolLM2-135M: NLL with a quantized KV cache minus NLL with a full one"
    finding = "the loss by context length, one line a cache"
    caption = Caption(title=title, finding=finding, subtitle="same targets; 95% bands over documents")
    spec = length_figure(
        shown,
        caption,
        looks=series_looks(list(dict.fromkeys(shown["setting"]))),
        number_format="+.4f",
        tooltip=SCORE_TOOLTIP,
        y_title="difference (nats per token, stretched near 0)",
        levels={0.0: ""},
        y_scale="symlog",
        y_domain=(min(-0.01, 1.1 * ends.min().min()), 1.2 * ends.max().max()),
        y_values=(0.0, 0.03, 0.1, 0.3, 1.0, 3.0),
        y_format="~g",
    )
    write_png(spec, file)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("texts", type=Path, help="gzipped JSON lines of documents")
    parser.add_argument("output", type=Path, help="JSON lines to append to")
    parser.add_argument("--caches", nargs="+", default=["quantized:8", "quantized:4", "quantized:2"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--targets", type=int, default=64, help="targets of a document, its last tokens")
    parser.add_argument("--room", type=int, default=16384, help="tokens of each document, of which the last are scored")
    parser.add_argument("--part", default="1/1", help="which part of the documents, such as 1/2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the table of finished lines instead")
    parser.add_argument("--figure", type=Path, help="with --table, a PNG to write")
    options = parser.parse_args(arguments)
    if options.table:
        table = differences(read(options.output))
        print_table(table)
        if options.figure is not None:
            draw(table, options.figure)
    else:
        measure(options)


if __name__ == "__main__":
    main()
