"""Writes demo/README.md and its figures from the results files alone; no measured number on it is typed by hand.

    python -m research.published_results.write_demo_page docs/results/demo/results.tar.xz

The archive holds lm-eval's result and samples files of the two shipped checkpoints, one folder a checkpoint below
`results/`. What was trained on what comes from the training records beside the checkpoints.
"""

import itertools
import json
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.published_results.figures import keep, report_figures
from research.published_results.found import FIXED, NAMES, STREAM, number, read_tasks, signed, table
from sbeval.corpora.archives import unpack
from sbeval.reports.analyse.claims import LengthClaims, length_claims
from sbeval.reports.kinds.runs import rebuilt_command
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.files import Notes
from sbeval.reports.read.runs import EvaluationRun, read_run
from sbeval.reports.read.samples import SumsByDocument
from sbeval.results.intervals import UNEVEN_COVERAGE, ratio_interval

PAGES = Path(__file__).parents[2] / "docs" / "results"
CHECKPOINTS = PAGES.parents[1] / "sbeval" / "demo" / "checkpoints"
MODELS = ("stickbreaking", "rope")
POSITION = "sb_stdlib_position"
Metrics = dict[tuple[str, str], dict[str, Any]]


def levels(metrics: Metrics, sums: dict[tuple[str, str], SumsByDocument], task: str) -> list[str]:
    """NLL at every length, with its interval, computed from the sums by document."""
    lengths = sums[MODELS[0], task].lengths
    rows = []
    for model in MODELS:
        row = [NAMES[model]]
        own = sums[model, task]
        for column, length in enumerate(lengths):
            found = ratio_interval(own.nll_nats[:, column], own.tokens[:, column], seed=0)
            assert abs(found.estimate - metrics[model, task][f"nll@{length:07d}"]) < 1e-6
            row.append(f"{number(found.estimate)} [{number(found.low)}, {number(found.high)}]")
        rows.append(row)
    return table(["", *map(length_text, lengths)], rows)


def differences(claims: dict[str, LengthClaims]) -> list[str]:
    """NLL minus NLL at the training length, with bands that are simultaneous over a row."""
    lengths = [item.context_length_tokens for item in claims[MODELS[0]].differences]
    rows = [
        [NAMES[model], *(signed((item.estimate, item.low, item.high)) for item in claims[model].differences)]
        for model in MODELS
    ]
    return table(["", *map(length_text, lengths)], rows)


def verdicts(claims: dict[str, dict[str, LengthClaims]]) -> list[str]:
    """What the report's two rules say."""
    rows = []
    for task, own in claims.items():
        for model in MODELS:
            claim = own[model]
            lowers = "no length" if claim.lowers_to_tokens is None else length_text(claim.lowers_to_tokens)
            raises = "nowhere" if claim.raises_from_tokens is None else f"from {length_text(claim.raises_from_tokens)}"
            rows.append([f"`{task}`", NAMES[model], lowers, raises])
    return table(["task", "model", "more context lowers NLL up to", "measurably above NLL at 1K"], rows)


def by_position(metrics: Metrics) -> list[str]:
    """Mean NLL between powers of four of the position in the longest window."""
    bins = {model: metrics[model, POSITION]["position_nll"] for model in MODELS}
    longest = bins[MODELS[0]][-1][1]
    edges = [edge for power in range(4, 10) if (edge := 4**power) <= longest]
    header, rows = [""], [[NAMES[model]] for model in MODELS]
    for low, high in zip([1, *edges[:-1]], edges, strict=True):
        header.append(f"{low:,} to {high - 1:,}")
        for row, model in zip(rows, MODELS, strict=True):
            inside = [item for item in bins[model] if low <= item[0] and item[1] < high]
            row.append(number(sum(item[2] * item[3] for item in inside) / sum(item[3] for item in inside)))
    return table(header, rows)


def training(records: dict[str, dict[str, Any]]) -> list[str]:
    """What was trained on what."""
    facts = {
        "parameters": lambda one: f"{one['parameters']:,}",
        "layers, hidden size, heads": lambda one: ", ".join(
            str(one["recipe"]["model"][key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        ),
        "training length": lambda one: f"{one['recipe']['model']['training_length_tokens']:,} tokens",
        "tokens seen": lambda one: f"{one['tokens_seen']:,}",
        "of them different": lambda one: f"{one['unique_tokens']:,} ({one['epochs']:.1f} passes)",
        "hash of the packed tokens": lambda one: f"`{one['data']['packed_sha256'][:16]}`",
        "windows of recall text": lambda one: f"1 in {1 / one['recipe']['data']['recall_share']:.0f}",
        "learning rate, seed": lambda one: (
            f"{one['recipe']['optimization']['learning_rate']:g}, {one['recipe']['seed']}"
        ),
        "last training loss": lambda one: f"{one['loss_curve'][-1]['loss_nats']:.3f} nats",
        "seconds, GPU": lambda one: f"{one['seconds']:.0f}, {', '.join(one['gpus'])}",
    }
    rows = [[name, *(fact(records[model]) for model in MODELS)] for name, fact in facts.items()]
    commands = [command for model in MODELS for command in records[model]["commands"]]
    data = records[MODELS[0]]["data"]
    held = data["held_out"]
    return [
        *table(["", *(NAMES[model] for model in MODELS)], rows),
        f"The text is the Python source of {len(data['packages'])} packages ({data['files']:,} files). Kept out: the "
        f"{held['what']}, {held['files']} files; {held['sharing_files_dropped']['files']:,} training files that shared "
        f"a span of {held['span_tokens']} tokens with it were dropped, and "
        f"{held['after']['held_out_spans_found_in_training']} of its {held['distinct_spans']:,} spans are left in the "
        "training text. Versions, hashes and the loss curve: `sbeval/demo/checkpoints/*/training_record.json`. One "
        "seed a model, one learning rate for both, tuned for neither.",
        "",
        "```",
        *commands,
        "```",
        "",
    ]


def commands(runs: Sequence[EvaluationRun]) -> list[str]:
    lines = []
    for run in runs:
        configs = json.loads(run.path.read_text(encoding="utf-8"))["configs"]
        metadata = configs[run.tasks[0].name]["metadata"]
        asked = {key: metadata[key] for key in ("context_lengths", "data_path")}
        lines.append(f"{rebuilt_command(run)} --metadata {shlex.quote(json.dumps(asked))} --log_samples --device cuda")
    return ["```", *lines, "```", ""]


def steps(claims: dict[str, LengthClaims]) -> list[str]:
    """NLL minus NLL at the length before, with bands that are simultaneous over a row."""
    lengths = claims[MODELS[0]].lengths
    header = [f"{length_text(one)} to {length_text(other)}" for one, other in itertools.pairwise(lengths)]
    rows = [
        [NAMES[model], *(signed((item.estimate, item.low, item.high)) for item in claims[model].steps)]
        for model in MODELS
    ]
    return table(["", *header], rows)


def lower_beyond(claims: dict[str, LengthClaims]) -> list[str]:
    """Says where NLL is below that at the training length although no step there is measurable by itself."""
    lines = []
    for model, claim in claims.items():
        named = claim.lowers_to_tokens or 0
        later = [item for item in claim.differences if item.context_length_tokens > named and item.high < 0]
        if later:
            last = later[-1]
            lines.append(
                f"{NAMES[model]}: beyond {length_text(named)} no step from one length to the next is measurable by "
                f"itself, but measurably below {length_text(claim.reference_tokens or 0)} lies NLL at "
                f"{', '.join(length_text(item.context_length_tokens) for item in later)}, the last of them by "
                f"{signed((last.estimate, last.low, last.high))}."
            )
    return [*lines, ""] if lines else []


def doubt(claims: dict[str, LengthClaims]) -> list[str]:
    """Says where the documents' sizes make intervals doubtful."""
    if not any(claim.doubtful for claim in claims.values()):
        return []
    return [
        f"The intervals and bands of this section are doubtful: the files differ so much in size that 95% intervals "
        f"cover {UNEVEN_COVERAGE} in simulations (`research/interval_studies/coverage.py`).",
        "",
    ]


def page(folder: Path) -> str:
    """Returns the page as Markdown."""
    metrics, sums = read_tasks(folder)
    files = sorted(folder.glob("results/*/*/results_*.json"))
    runs = [run for file in files if (run := read_run(file, Notes())) is not None]
    records = {
        model: json.loads((CHECKPOINTS / model / "training_record.json").read_text(encoding="utf-8"))
        for model in MODELS
    }
    trained = records[MODELS[0]]["recipe"]["model"]["training_length_tokens"]
    claims = {task: {model: length_claims(sums[model, task], trained) for model in MODELS} for task in (FIXED, STREAM)}
    model = runs[0].record
    targets = {task: metrics[MODELS[0], task][f"tokens@{trained:07d}"] for task in (FIXED, STREAM)}
    seconds = sum(float(str(run.raw["total_evaluation_time_seconds"])) for run in runs)
    lines = [
        "# The demo's two checkpoints over the whole standard library",
        "",
        f"Stick-breaking against softmax with RoPE, trained at {trained:,} tokens, evaluated to 64 times that on the "
        f"text kept out of training ({records[MODELS[0]]['data']['held_out']['what']}); {model.gpu}, {model.dtype}, "
        f"nothing skipped, no `--limit`, {seconds:.0f} s in all. NLL in "
        "nats per token; brackets are 95% intervals over source documents. Written by "
        "`research/published_results/write_demo_page.py` from `results.tar.xz`. `make demo` runs a small part of this "
        "on a CPU.",
        "",
        "## What context does",
        "",
        *verdicts(claims),
        *lower_beyond(claims[FIXED]),
        "By the rules of `reports/analyse/claims.py`, on the same targets at all lengths: more context lowers NLL up "
        "to the longest length that is measurably below the length before it (bands simultaneous over all such "
        "steps); it hurts where NLL is measurably above that at the training length. In `fixed_target` only the "
        "context before the targets grows, so it alone shows that context is used; `stream` falls with length for any"
        " model that does not break.",
        "",
        f"## `{FIXED}`: {targets[FIXED]:,} targets, the same at every length, in "
        f"{claims[FIXED][MODELS[0]].clusters} files",
        "",
        *levels(metrics, sums, FIXED),
        f"NLL minus NLL at {length_text(trained)}, paired over files; 95% bands, simultaneous over a row:",
        "",
        *differences(claims[FIXED]),
        "NLL minus NLL at the length before, likewise:",
        "",
        *steps(claims[FIXED]),
        "![NLL against context length, identical targets](figures/fixed_target.png)",
        "",
        f"## `{STREAM}`: {targets[STREAM]:,} targets in {claims[STREAM][MODELS[0]].clusters} joined files",
        "",
        *levels(metrics, sums, STREAM),
        f"NLL minus NLL at {length_text(trained)}, as above:",
        "",
        *differences(claims[STREAM]),
        *doubt(claims[STREAM]),
        "![NLL against context length, joined files](figures/stream.png)",
        "",
        f"## `{POSITION}`: one pass at {length_text(metrics[MODELS[0], POSITION]['position_nll'][-1][1])}",
        "",
        "Mean NLL of the targets at these positions. These files hold no sums by document and position, so there are "
        "no intervals here.",
        "",
        *by_position(metrics),
        "![NLL by position](figures/position.png)",
        "",
        "## Training",
        "",
        *training(records),
        "## Commands",
        "",
        "The results files keep lm-eval's settings, not how it was called; from them `sbeval report` rebuilds these. "
        "`stdlib311` is the folder with that library's `.py` files. Paths of the machine are shortened in the archive.",
        "",
        *commands(runs),
        "```",
        "mkdir -p build/demo && tar -C build/demo -xJf docs/results/demo/results.tar.xz",
        shlex.join(["sbeval", "report", "build/demo/results", "-o", "report/"]),
        "```",
    ]
    return "\n".join(lines) + "\n"


def draw(folder: Path, target: Path) -> None:
    """Draws the figures of an unpacked archive into `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    files = sorted(folder.glob("results/*/*/results_*.json"))
    found = report_figures(files, folder, {"stickbreaking": "stick-breaking", "rope": "RoPE"})
    for protocol in ("fixed_target", "stream"):
        keep(found, f"stdlib-{protocol}*-nll", target / protocol)
    keep(found, "stdlib-position", target / "position")


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            unpack(packed, Path(folder))
        (PAGES / "demo" / "README.md").write_text(page(Path(folder)), encoding="utf-8")
        draw(Path(folder), PAGES / "demo" / "figures")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
