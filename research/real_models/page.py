"""Writes the tables of docs/results/smollm2/README.md or docs/results/gemma3/README.md from the results of `evaluate`.

    mkdir -p build/smollm2 && tar xJf docs/results/smollm2/results.tar.xz -C build/smollm2
    sbeval report build/smollm2/results -o build/smollm2/report
    python -m research.real_models.page smollm2 build/smollm2

`summary.md` of a report holds every table; a page takes those below, and the commands from `jobs.jsonl`.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGES = Path("docs/results")
MARKS = ("<!-- tables -->", "<!-- end of tables -->")
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Page:
    """The contents of a page.

    Attributes:
        tables: beginnings of the titles of the report's tables.
        figures: beginning of a figure's name in the report to its name on the page.
        layers: layers that see the whole text, where the page has a table of attention by layer.
    """

    tables: tuple[str, ...]
    figures: Mapping[str, str]
    layers: tuple[int, ...] = ()


SHOWN = {
    "smollm2": Page(
        tables=(
            "modules, fixed target: NLL",
            "modules, fixed target: paired NLL difference",
            "packages, fixed target: NLL",
            "packages, stream: NLL",
            "texts/wikitext, stream: NLL",
            "RULER scores, task by task",
            "Copying a passage",
            "sb\\_niah\\_single\\_1\\_forced: exact answers",
            "sb\\_niah\\_single\\_2\\_forced: exact answers",
            "JSON keys and values",
            "Many-shot",
            "Attention: keys, weights, entropy",
        ),
        figures={"modules-fixed_target-": "nll", "needles-niah_single_1": "needle"},
    ),
    "gemma3": Page(
        tables=(
            "library, fixed target: NLL",
            "library, fixed target: paired NLL difference",
            "library, stream: NLL",
            "RULER scores, task by task",
            "Many-shot",
            "Attention: keys, weights, entropy",
        ),
        figures={"library-fixed_target-": "nll"},
        layers=(5, 11, 17),
    ),
}


def tables_of(summary: str, titles: Sequence[str]) -> list[str]:
    """Returns the tables that a page shows, each with its title; those that the report lacks are named and left out."""
    tables = []
    for title in titles:
        match = re.search(rf"^\*\*{re.escape(title)}.*?(?=^\*\*|^#|\Z)", summary, re.MULTILINE | re.DOTALL)
        if match is None:
            print(f"leaves out the table {title!r}: summary.md does not have it")
        else:
            tables.append(match[0].strip())
    return tables


def results_of(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the results files, each with the name of its job."""
    for file in sorted(folder.glob("results/*/*/results_*.json")):
        yield file.parents[1].name, json.loads(file.read_text(encoding="utf-8"))


def by_layer(folder: Path, layers: Sequence[int]) -> str | None:
    """Returns a table of the attention of each layer that sees the whole text, and of the mean of the others.

    None where no attention spans were measured.
    """
    rows: dict[str, dict[int, list[list[float]]]] = {}
    for _, results in results_of(folder) if layers else ():
        for key, heads in results["results"].get("sb_span", {}).items():
            named_length = re.fullmatch(r"attention_span@(\d+),none", key)
            if named_length is None:
                continue
            tokens = int(named_length[1])
            for head in heads:
                name = f"layer {head[0]:.0f}, the whole text" if head[0] in layers else "layers with windows"
                rows.setdefault(name, {}).setdefault(tokens, []).append(head)
    if not rows:
        return None
    lengths = sorted(next(iter(rows.values())))
    lines = [
        "**Attention by layer, means over heads: keys that hold half of the weight, weight on the first token, entropy "
        "in nats**",
        "",
        "| layer | " + " | ".join(f"{tokens // 1024}K" for tokens in lengths) + " |",
        "| --- |" + " ---: |" * len(lengths),
    ]
    for name, of_length in sorted(rows.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        cells = []
        for tokens in lengths:
            heads = of_length[tokens]
            half, first, entropy = (sum(head[place] for head in heads) / len(heads) for place in (2, 6, 7))
            cells.append(f"{half:,.1f} keys, {first:.1%}, {entropy:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def estimates_table(folder: Path) -> str | None:
    """Returns a table of `sbeval inspect`'s estimates and the runs' measurements; None if nothing was estimated.

    The expected time is that in the model, loading aside.
    """
    runs = dict(results_of(folder))
    lines = []
    for file in sorted(folder.glob("estimates/*.json")):
        if file.stem not in runs:
            continue
        text = file.read_text(encoding="utf-8")
        inspected = json.loads(text[text.index("{") :])
        record = runs[file.stem]["config"]["sbeval"]
        memory = record["peak_memory_bytes"]
        expected_memory = expected_bytes(
            inspected, record["generated"] is not None, int(runs[file.stem]["config"]["batch_size"])
        )
        estimate = inspected["estimate"]
        expected_seconds = "" if estimate is None else f"{sum(estimate['model_seconds'].values()):.0f}"
        took = runs[file.stem]["total_evaluation_time_seconds"]
        cells = (
            file.stem,
            f"{expected_memory / MIB:,.0f}",
            "" if memory is None else f"{memory / MIB:,.0f}",
            expected_seconds,
            f"{float(took):.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return None
    title = "**`sbeval inspect` and the runs: memory in MiB, time in seconds**"
    head = "| run | memory expected | peak | time in the model, expected | whole evaluation |\n| --- |" + " ---: |" * 4
    return "\n".join([title, "", head, *lines])


def expected_bytes(inspected: Mapping[str, Any], generated: bool, batch_size: int) -> int:
    """Returns the memory that `sbeval inspect` expects of a run: the weights, and batches of windows or of texts."""
    longest = max(inspected["memory"]["needs"], key=lambda need: int(need["length_tokens"]))
    prefill = longest.get("prefill", int(longest["generation"]) - int(longest["further_text"]))  # older: of one prompt
    of_texts = int(prefill) + batch_size * int(longest["further_text"])
    need = of_texts if generated else max(int(longest["batch"]), int(longest["last_targets"]))
    return int(inspected["checkpoint"]["sizes"]["weight_bytes"]) + need


def main(arguments: Sequence[str]) -> None:
    """Command line of the page."""
    name, folder = arguments[0], Path(arguments[1])
    shown, page = SHOWN[name], PAGES / name / "README.md"
    report = folder / "report"
    jobs = [json.loads(line) for line in (folder / "jobs.jsonl").read_text(encoding="utf-8").splitlines()]
    done = [job for job in jobs if job.get("exit_code") in (0, None)]
    commands = "\n".join(f"# {job['job']}: {job['seconds']:.0f} s\n{job['command']}" for job in done)
    parts = tables_of((report / "summary.md").read_text(encoding="utf-8"), shown.tables)
    parts += [table for table in (by_layer(folder, shown.layers), estimates_table(folder)) if table is not None]
    title = "<details><summary>Every command, with its seconds while other jobs ran</summary>"
    listed = f"{title}\n\n```text\n{commands}\n```\n\n</details>"
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page.write_text("\n\n".join([before + MARKS[0], *parts, listed, MARKS[1] + after]), encoding="utf-8")
    (page.parent / "figures").mkdir(exist_ok=True)
    for beginning, figure in shown.figures.items():
        (image,) = (
            file
            for file in (report / "figures").glob(f"{beginning}*.png")
            if not file.stem.endswith(("differences", "token_perplexity"))
        )
        shutil.copyfile(image, page.parent / "figures" / f"{figure}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
