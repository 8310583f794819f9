"""Writes extrapolation/README.md and claims.md from the result files alone; no number on them is typed by hand.

    python -m research.published_results.write_pages docs/results/extrapolation/results.tar.xz

The archive is what `research.paper_experiments.extrapolation` leaves: lm-eval's result and samples files, training
records, the MQRAR tables, the plan and the ledger of jobs.
"""

import json
import re
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.published_results.claims import claims_page
from research.published_results.figures import draw
from research.published_results.found import FIXED, LATER, NAMES, STREAM, Found, multiple_name, number, read, table
from research.published_results.headline import headline
from research.published_results.packed import packed_section
from research.published_results.rivals import rivals_section
from research.published_results.scored_text import DOUBTFUL_NOTE, scored, seed_spread
from sbeval.corpora.archives import unpack

PAGES = Path(__file__).parents[2] / "docs" / "results"
MACHINE_FOLDERS = re.compile(r"(/[\w./-]*?)?\.(gpu/)?carry/|/[\w./-]*?(?=build/|benchmarks/)")
NEEDLE_TASKS = ("sb_niah_single_1", "sb_niah_multikey_1", "sb_niah_single_1_forced", "sb_niah_multikey_1_forced")
PROBED = ("stickbreaking", "rope", "rope_dynamic4", "stickbreaking_extended", "rope_extended")
"""The models that look for needles."""
PATHS = ("data", "packed", "held_out", "out", "essays")
MOVED = ("sbeval.training.experiments", "research.paper_experiments")
"""The package of the experiments when they were run, and today's."""


def multiples(found: Found, task: str) -> list[float]:
    most = 64 if task == STREAM else 16
    return [multiple for multiple in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if multiple <= most]


def curves(found: Found, task: str) -> list[str]:
    columns = multiples(found, task)
    rows = []
    for scheme, name in NAMES.items():
        for run in found.seeds(scheme) if scheme in ("stickbreaking", "rope") else [scheme]:
            if (run, task) in found.metrics:
                label = name if run == scheme else f"{name}, seed {run.rpartition('seed')[2]}"
                rows.append([label, *(number(found.nll(run, task, multiple)) for multiple in columns)])
        if (scheme, task) in unfinished(found):
            rows.append([f"{name} (not finished)", *("-" for _ in columns)])
    return table(["scheme", *map(multiple_name, columns)], rows)


def searches(found: Found) -> list[str]:
    rates = found.plan["learning_rates"]
    rows = []
    for scheme in [*found.plan["schemes"], *found.added]:
        losses = [found.records.get(f"search_{scheme}_{rate:g}", {}).get("validation", {}).get("nll") for rate in rates]
        chosen = (
            found.records.get(f"scheme_{scheme}", {}).get("recipe", {}).get("optimization", {}).get("learning_rate")
        )
        final = found.records.get(f"scheme_{scheme}", {}).get("validation", {}).get("nll")
        rows.append([NAMES[scheme], *map(number, losses), "-" if chosen is None else f"{chosen:g}", number(final)])
    return table(["scheme", *(f"{rate:g}" for rate in rates), "chosen", "validation NLL of the whole run"], rows)


def edges(found: Found) -> list[str]:
    """Says whose learning rate the search could not bracket, and what it rests on."""
    schemes = [*found.plan["schemes"], *found.added]
    edge = [NAMES[scheme] for scheme in schemes if found.edge_rate(scheme) is not None]
    share = found.plan["search_tokens"] / found.plan["tokens"]
    line = (
        f"A search run sees {share:.0%} of the tokens of a whole run, so that a rate that is best late may be missed."
    )
    if edge:
        line += f" The best rate tried lies at the edge of the grid for: {', '.join(edge)}."
    return [line, ""]


def fire_rates(found: Found) -> list[str]:
    """Says what part of FIRE's distance to the others is that its biases are learnt slowly."""
    if found.fire_rates is None or "scheme_fire" not in found.records:
        return []
    runs = found.fire_rates["runs"]
    size, steps = sorted({run["parameters"] for run in runs}), max(run["steps"] for run in runs)
    (rope,) = (run for run in runs if run["attention"] == "rope")
    fire = sorted((run for run in runs if run["attention"] == "fire"), key=lambda run: run["bias_rate_factor"])
    each = " and ".join(
        f"{run['nll']:.3f} with its biases learnt at {times(run['bias_rate_factor'])}the rate of the other weights "
        f"(the farthest key's then lies {run['bias_range']:.1f} from the nearest's)"
        for run in fire
    )
    return [
        "Every scheme learns all its weights at one rate. FIRE's biases begin almost flat and have to grow first, and "
        "a rate that suits the other weights is slow for them; so part of what it lacks at the training length may be "
        f"for want of steps, or of a rate of their own. On byte models of {size[0]:,} to {size[-1]:,} parameters, "
        f"{steps} steps on a CPU at a rate of {rope['rate']:g}, one seed (`fire_rates.py`), the loss over the last "
        f"{found.fire_rates['last_steps']} steps is {rope['nll']:.3f} with RoPE, with FIRE {each}. The tables have "
        "FIRE at one rate, as the others.",
        "",
    ]


def times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} times "


TRAINED_AGAIN = (
    "FIRE was searched, trained and evaluated a second time, after the other schemes and at later commits (those that "
    "`machine.json` names in its additions to the archive). The first time the network that makes its biases began "
    "with small weights and no constants, which left half of its units dead; it now begins as PyTorch's layers do. Its "
    "training data, tokens and evaluations are the others'."
)
"""What was not run with the rest."""
ADDED_LATER = (
    "{name} (forget gates, Lin et al. 2025, without the rest of its authors' layers) was searched, trained and "
    "evaluated after the others and at a later commit (`machine.json` names it in its addition to the archive), by the "
    "same commands, on the same tokens in the same order."
)


def unfinished(found: Found) -> list[tuple[str, str]]:
    """Schemes evaluated under one protocol of the two, with the other."""
    both = (STREAM, FIXED)
    return [
        (scheme, task)
        for scheme in NAMES
        for task, other in zip(both, reversed(both), strict=True)
        if (scheme, task) not in found.metrics and (scheme, other) in found.metrics
    ]


def missing(found: Found) -> list[str]:
    """Says plainly what has no result."""
    lines = [
        f"**The evaluation of {NAMES[scheme]} under `{task}` was never finished**, for want of time on the machine: it "
        "stands in the other protocol's table and figure alone, and where a claim compares schemes by this protocol it "
        "is not among them."
        for scheme, task in unfinished(found)
    ]
    there = [scheme for scheme in NAMES if scheme not in LATER or scheme in found.added]
    wanted = [(scheme, task) for scheme in there for task in (STREAM, FIXED)]
    wanted += [(scheme, task) for scheme in PROBED for task in NEEDLE_TASKS]
    tried = {(run["attention"], run["pairs"]) for run in found.recall}
    if "scheme_fire" in found.records:
        lines.append(TRAINED_AGAIN)
    lines += [ADDED_LATER.format(name=NAMES[scheme]) for scheme in found.added]
    left = [
        f"{scheme} {task}"
        for scheme, task in wanted
        if (scheme, task) not in found.metrics and (scheme, task) not in unfinished(found)
    ]
    left += [
        f"MQRAR {attention} {pairs}"
        for pairs in found.plan["recall_pairs"]
        for attention in ("stickbreaking", "rope")
        if (attention, pairs) not in tried
    ]
    if left:
        names = ", ".join(f"`{name}`" for name in left)
        lines.append(f"Not run, or not to its end, for want of time on the machine: {names}.")
    return [part for line in lines for part in (line, "")]


def recall_table(found: Found) -> list[str]:
    pairs = sorted({run["pairs"] for run in found.recall})
    rows = []
    for attention, name in (("stickbreaking", "stick-breaking"), ("rope", "softmax + RoPE")):
        row = [name]
        for count in pairs:
            runs = [run for run in found.recall if (run["attention"], run["pairs"]) == (attention, count)]
            best = max(runs, key=lambda run: run["accuracy"], default=None)
            row.append("-" if best is None else recall_cell(best, runs))
        rows.append(row)
    return table(["attention", *(f"{count} pairs" for count in pairs)], rows)


def recall_cell(best: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """The best run's accuracy, what it took, and how many rates it is the best of."""
    rates = len({run["learning_rate"] for run in runs})
    took = f"{'solved in' if best['solved'] else 'not solved within'} {best['steps_taken']:,} steps"
    return f"{best['accuracy']:.3f}, {took}, rate {best['learning_rate']:.1e} of {rates} tried"


def recall_runs(found: Found) -> list[str]:
    """Every run, so that unequal budgets can be seen."""
    rows = []
    for run in sorted(found.recall, key=lambda run: (run["attention"] == "rope", run["pairs"], run["learning_rate"])):
        planned = run["steps"]
        ended = "solved" if run["solved"] else "all steps" if run["steps_taken"] == planned else "out of time"
        warmup = run.get("warmup_steps")
        rows.append(
            [
                run["attention"],
                str(run["pairs"]),
                f"{run['learning_rate']:.1e}",
                f"{planned:,}, {planned // 10 if warmup is None else warmup:,}",
                f"{run['steps_taken']:,} ({ended})",
                f"{run['sequences_seen']:,}",
                run.get("precision", "float32"),
                number(run["accuracy"]),
            ]
        )
    header = ["attention", "pairs", "rate", "steps planned, of warm-up", "steps taken", "sequences", "trained in"]
    return table([*header, "accuracy"], rows)


def needles(found: Found) -> list[str]:
    lines = []
    for task in NEEDLE_TASKS:
        metric = "exact_match" if task.endswith("forced") else "score"
        rows = []
        for scheme, name in NAMES.items():
            if (scheme, task) in found.metrics:
                keys = [f"{metric}@{multiple * found.length:07d}" for multiple in (1, 2, 4, 8, 16)]
                rows.append([name, *(number(found.metrics[scheme, task].get(key), 2) for key in keys)])
        if rows:
            lines += [f"`{task}`, {metric}:", "", *table(["scheme", "1x", "2x", "4x", "8x", "16x"], rows)]
    return lines


def speeds(found: Found) -> list[str]:
    rows = []
    for row in found.speed:
        rope = [r["tokens_per_second"] for r in found.speed if (r["size"], r["attention"]) == (row["size"], "rope")]
        ratio = f"{row['tokens_per_second'] / rope[0] - 1:+.1%}" if rope else "-"
        peak = row["peak_memory_bytes"]
        memory = "-" if peak is None else f"{peak / 2**20:,.0f} MiB"
        rows.append([row["size"], row["attention"], f"{row['tokens_per_second']:,.0f}", ratio, memory])
    return table(["model", "attention", "tokens/s", "against RoPE", "peak memory"], rows)


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            unpack(packed, Path(folder))
        found = read(Path(folder))
        draw(Path(folder), PAGES / "extrapolation" / "figures")
    (PAGES / "claims.md").write_text(claims_page(found), encoding="utf-8")
    (PAGES / "extrapolation" / "README.md").write_text(results_page(found), encoding="utf-8")
    (PAGES / "extrapolation" / "commands.md").write_text(commands_page(found), encoding="utf-8")


def commands_page(found: Found) -> str:
    """Every command that was run, as it is typed beside an installed sbeval."""
    rows = []
    for job in found.jobs:
        words = shlex.split(job["command"])
        if "-m" in words:  # python -P -u -m module ...
            module, *rest = words[words.index("-m") + 1 :]
            module = module.replace(*MOVED)
            words = ["sbeval", *rest] if module == "sbeval" else ["python", "-m", module, *rest]
        else:
            words = ["python", *words[1:]]
        line = shlex.join(MACHINE_FOLDERS.sub("", word) for word in words)
        ended = "" if job["exit_code"] == 0 else f", exit code {job['exit_code']}"
        place = "CPU" if job["gpu"] is None else f"GPU {job['gpu']}"
        rows.append(f"{job['job']} ({place}, {job['seconds']} s{ended}):\n\n    {line}\n")
    head = (
        "# Every command of the experiment\n\nIn the order in which they ended, with the seconds of the whole process "
        "beside others on the same GPU. `research.paper_experiments.extrapolation` makes them from its options "
        f"(`plan.json`):\n\n    {json.dumps({key: found.plan[key] for key in found.plan if key not in PATHS})}\n"
    )
    return "\n".join([head, *rows])


def results_page(found: Found) -> str:
    full = [
        found.records[name] for name in found.records if name.startswith("scheme_") and "recipe" in found.records[name]
    ]
    tokens = sorted({record["tokens_seen"] for record in full})
    gpus = sorted({gpu for record in found.records.values() for gpu in record["gpus"]})
    parameters = sorted({record["parameters"] for record in full})
    lines = [
        "# Length extrapolation, context extension, recall",
        "",
        *headline(found),
        f"Models of {parameters[0]:,} to {parameters[-1]:,} parameters, training length {found.length}, "
        f"{' or '.join(f'{count:,}' for count in tokens)} tokens each, the same in the same "
        "order (in windows of 4x where a scheme trains on those); "
        f"{found.plan['search_tokens']:,} tokens a run of the learning-rate search. Evaluated on the standard library "
        "of CPython 3.11.7, which was kept out of the training text. NLL in nats per token. "
        f"{' and '.join(gpus) or 'CPU'}; {found.gpu_hours:.1f} GPU hours for everything, evaluations included. "
        "Written by `research/published_results/write_pages.py` from `results.tar.xz`; [every command](commands.md) "
        "with its seconds.",
        "",
        "1x is the training length before any extension; the lower the NLL, the better. On joined files any model that "
        "does not break falls with length; that added context helps is shown by the same targets inside their own file "
        "alone. What follows for the paper's claims: [claims](../claims.md).",
        "",
        scored(found),
        "",
        f"The two extended models saw {found.plan['extension_tokens']:,} tokens more than the others, in windows of 4x "
        f"with a learning rate of {found.plan['extension_rate']:g} at its peak (the paper's schedule, shorter): they "
        "are to be compared with each other and with themselves before, not with schemes that were trained once.",
        "",
        "With dynamic scaling the frequencies follow the length evaluated, and models trained with it saw those of 4x "
        "alone: at 1x and below they are off their training.",
        "",
        *missing(found),
        "## `sb_stdlib_stream`: joined files, the same targets at every length",
        "",
        *curves(found, STREAM),
        "![NLL against context length, joined files](figures/schemes-stream.png)",
        "",
        "Sliding windows, and RoPE trained at 4x length, beside the schemes above:",
        "",
        "![NLL against context length, sliding windows](figures/windows-stream.png)",
        "",
        "![NLL against context length, trained at 1x and 4x](figures/training-length-stream.png)",
        "",
        "Stick-breaking with remainder bias and head norm:",
        "",
        "![NLL against context length, remainder bias and head norm](figures/remainder-stream.png)",
        "",
        "## `sb_stdlib_fixed_target`: the same targets, all context inside their own file",
        "",
        "Hardly a file of this text is long enough for more than 16x.",
        "",
        *curves(found, FIXED),
        "Before and after extension to 4x:",
        "",
        "![before and after extension, joined files](figures/extension-stream.png)",
        "",
        "![before and after extension, one file](figures/extension-fixed_target.png)",
        "",
        *rivals_section(found),
        "## Seeds beside documents",
        "",
        f"A seed sets the initial weights and the order of the data: 0 for every scheme, 0 to "
        f"{int(found.plan['seeds']) - 1} for stick-breaking and RoPE, 1 for the order of the extension's data.",
        "",
        "`sb_stdlib_stream`:",
        "",
        *seed_spread(found, STREAM),
        DOUBTFUL_NOTE,
        "",
        "`sb_stdlib_fixed_target`:",
        "",
        *seed_spread(found, FIXED),
        "## Learning rates: validation NLL at the scheme's own training length",
        "",
        *searches(found),
        *edges(found),
        *fire_rates(found),
        "## MQRAR: best accuracy over the learning rates tried",
        "",
        "Batches of 64 sequences of 768 tokens that never repeat; the first rate that reaches 0.99 ends its cell. "
        "A cell that is not solved says so for the steps of its best run and no more: the public code of the paper's "
        "first author (`shawntan/zoology`) allows 100,000 sequences 64 times over in batches of 256, 6.4 million in "
        f"25,000 steps; the longest run here saw {max((run['sequences_seen'] for run in found.recall), default=0):,}.",
        "",
        *recall_table(found),
        "Every run; steps planned set the learning rate, half a cosine after a linear warm-up. The list of commands "
        "lacks runs whose process was ended because their cell was solved; one is `python -m "
        "research.paper_experiments.mqrar --attention rope --pairs PAIRS --learning-rates RATE --steps STEPS "
        "--warmup-steps WARMUP --precision PRECISION --out FILE`, seed 0:",
        "",
        *recall_runs(found),
        "Attention on a sequence of 16 pairs (Figure 4's example):",
        "",
        "![attention of stick-breaking](figures/attention-stickbreaking-16-pairs.png)",
        "",
        "![attention of softmax with RoPE](figures/attention-rope-16-pairs.png)",
        "",
        "## Needles",
        "",
        *needles(found),
        "Score by length and depth:",
        "",
        "![one needle by length and depth](figures/niah_single_1.png)",
        "",
        "![one needle among others by length and depth](figures/niah_multikey_1.png)",
        "",
        *packed_section(found),
        "## Training speed at length 4096 (`benchmarks/training.py`)",
        "",
        "Forward, backward and optimizer step. `stickbreaking` and `rope` have random weights, those of the first "
        "shifted so that no stick breaks and every key is visited; `trained` is the shipped stick-breaking checkpoint "
        "on text, where keys behind a broken stick are left out.",
        "",
        *speeds(found),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
