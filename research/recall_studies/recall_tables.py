"""Tables of RULER, recall probes and attention spans from the files of finished runs, in Markdown.

Scores between 0 and 1 have their 95% interval, other means one standard error.

Each folder below FOLDER is one model and holds any number of `--output_path` folders with logged samples.

    python -m research.recall_studies.recall_tables FOLDER > tables.md
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sbeval.reports.analyse.statistics import score_interval

RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot"),
)
FORCED = tuple(f"{task}_forced" for task in RULER[:6])
BY_CONDITION = ("sb_copy_passage", "sb_copy_selective", "sb_copy_phrase", "sb_json_kv_forced", "sb_many_shot_file")
FEWEST_FOR_AN_ERROR = 10
Run = tuple[Path, dict[str, Any]]


def runs(model: Path) -> Iterator[Run]:
    """Yields the folder and content of each results file of a model, the newest of each folder."""
    for folder in sorted({path.parent for path in model.rglob("results_*.json")}):
        newest = sorted(folder.glob("results_*.json"))[-1]
        yield folder, json.loads(newest.read_text(encoding="utf-8"))


def samples(run: Run, task: str) -> list[dict[str, Any]]:
    """Returns the logged samples of a task; a file that holds fewer than were scored is an error."""
    files = sorted(run[0].glob(f"samples_{task}_2*.jsonl"))
    rows = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()] if files else []
    scored = run[1]["n-samples"][task]["effective"]
    if len(rows) != scored:
        raise SystemExit(
            f"{run[0]}: expected {scored} samples of {task}, found {len(rows)}: the run was ended as it wrote"
        )
    return rows


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def tokens_of(text: str) -> int:
    """Returns the tokens that `size` wrote."""
    return 1024 * int(text[:-1]) if text.endswith("K") else int(text)


def grid_of(run: Run, task: str) -> bool:
    return any(key == "depths" for key in run[1]["configs"][task]["metadata"])


def by_length(models: dict[str, list[Run]], tasks: Sequence[str], metric: str, digits: int = 2) -> str:
    """Returns the scores of all samples as the results files give them, which a run writes before its samples."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for task in tasks:
        for model, own in models.items():
            for run in own:
                results = run[1]["results"].get(f"sb_{task}", {})
                label = f"{task}, grid of depths" if results and grid_of(run, f"sb_{task}") else task
                for key, value in results.items():
                    if match := re.fullmatch(rf"{metric}@(\d+),none", key):
                        error = results[f"{metric}@{match[1]}_stderr,none"]
                        share = metric in ("score", "exact_match")
                        cell = (shown_share if share else shown)(value, error, results["sample_len"], digits)
                        found.setdefault((label, model), {})[int(match[1])] = cell
    lengths = sorted({length for cells in found.values() for length in cells})
    rows = [[*names, *(cells.get(length, "") for length in lengths)] for names, cells in found.items()]
    return table(["task", "model", *map(size, lengths)], rows)


def shown(value: float, error: float | str, count: int, digits: int) -> str:
    if count < FEWEST_FOR_AN_ERROR or isinstance(error, str):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def shown_share(value: float, error: float | str, count: int, digits: int) -> str:
    """Writes a score between 0 and 1 with its 95% interval; a single sample has none."""
    if count < 2 or isinstance(error, str):
        return f"{value:.{digits}f}"
    low, high = score_interval(value, error, count)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def depth_grid(models: dict[str, list[Run]], task: str, metric: str) -> str:
    parts = []
    for model, own in models.items():
        cells: dict[tuple[float, int], list[float]] = {}
        for run in own:
            if task in run[1]["results"] and grid_of(run, task):
                for sample in samples(run, task):
                    for (depth, *_), length in zip(
                        sample["doc"]["depths_percent"], sample["doc"]["lengths"], strict=True
                    ):
                        cells.setdefault((depth, length), []).append(sample[f"{metric}@{length:07d}"])
        depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
        counts = sorted({len(numbers) for numbers in cells.values()})
        rows = [[f"{depth:g} %", *(f"{mean(cells[depth, length]):.2f}" for length in lengths)] for depth in depths]
        parts.append(
            f"{model}, {'/'.join(map(str, counts))} samples a cell\n\n" + table(["depth", *map(size, lengths)], rows)
        )
    return "\n".join(parts)


def conditions(models: dict[str, list[Run]], task: str, note: Callable[[Run], str]) -> str:
    rows = []
    for model, own in models.items():
        for run in own:
            results = run[1]["results"].get(task, {})
            for key in results:
                metric, _, length = key.removesuffix(",none").partition("@")
                if metric.startswith("exact_match") and not length.endswith("_stderr") and key.endswith(",none"):
                    condition = metric.removeprefix("exact_match").strip("_").replace("_", " ")
                    keys, _, back = condition.removesuffix(" tokens").partition(" pairs")
                    other = [
                        results.get(f"{name}{metric.removeprefix('exact_match')}@{length},none")
                        for name in ("chance", "answer_nll", "retrieval_gain")
                    ]
                    error = results.get(f"{metric}@{length}_stderr,none", "N/A")
                    exact = shown_share(results[key], error, results.get("sample_len", 0), 3)
                    rest = ["" if value is None else f"{value:.5g}" for value in other]
                    rows.append([back.strip() or note(run), keys, size(int(length)), model, exact, *rest])
    rows.sort(key=lambda row: (row[0], int((row[1].split() or ["0"])[0]), tokens_of(row[2]), row[3]))
    header = [
        "",
        "keys or tokens back",
        "length",
        "model",
        "exact match",
        "guess",
        "NLL of the answer",
        "retrieval gain",
    ]
    return table(header, rows)


def steps_back(run: Run) -> str:
    """Returns how far back a run asked whose metrics do not say it."""
    asked = run[1]["configs"]["sb_mqrar_text"]["metadata"].get("n_back", 1)
    return f"{asked if isinstance(asked, int) else 1} back"


def spans(models: dict[str, list[Run]], lengths: Sequence[int]) -> str:
    rows = []
    for model, own in models.items():
        for run in own:
            results = run[1]["results"].get("sb_span", {})
            found = {length: results.get(f"attention_span@{length:07d},none") for length in lengths}
            for layer_rows in zip(*(rows_ for rows_ in found.values() if rows_), strict=True):
                cells = [
                    "/".join("" if value is None else f"{value:.0f}" for value in row[2:5]) + f", {row[5]:.2f}"
                    for row in layer_rows
                ]
                rows.append([model, *layer_rows[0][:2], *cells])
    return table(["model", "layer", "head", *map(size, lengths)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--span-lengths", default="1024,4096,16384")
    arguments = parser.parse_args()
    models = {path.name: list(runs(path)) for path in sorted(arguments.folder.iterdir()) if path.is_dir()}
    print("### RULER's score\n\n" + by_length(models, RULER, "score"))
    for metric in ("exact_match", "answer_nll", "retrieval_gain"):
        print(f"### Forced needles: {metric}\n\n" + by_length(models, FORCED, metric))
    for task, metric in (("sb_niah_single_1", "score"), ("sb_niah_multikey_1", "score")):
        print(f"### {task} by depth: {metric}\n\n" + depth_grid(models, task, metric))
        print(
            f"### {task}_forced by depth: retrieval_gain\n\n" + depth_grid(models, f"{task}_forced", "retrieval_gain")
        )
    print("### sb_mqrar\n\n" + conditions(models, "sb_mqrar", lambda run: ""))
    print("### sb_mqrar_text\n\n" + conditions(models, "sb_mqrar_text", steps_back))
    for task in ("sb_flipflop", *BY_CONDITION):
        print(f"### {task}\n\n" + conditions(models, task, lambda run: ""))
    lengths = [int(length) for length in arguments.span_lengths.split(",")]
    print("### sb_span: keys until 50 / 90 / 99 % of the weight, and the remaining stick\n\n" + spans(models, lengths))


if __name__ == "__main__":
    main()
