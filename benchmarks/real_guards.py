"""Every guard that compares a model with itself: its value on a checkpoint, beside its limit, in one table.

    python benchmarks/real_guards.py FOLDER [FOLDER ...] [--device cuda] [--dtype bfloat16] [--weights real,random]

Random weights have the configuration and the tokenizer of the checkpoint. Differences of logits are mean shares of
their spread. A row whose guard ends with an error shows the error, and the other rows follow. "CAUGHT" and "MISSED"
mark faults that were planted: a missing MLP and a wrong rotation have to be caught.

| guard | what is compared |
|---|---|
| trial | each change of `prepare` alone, and all of them, on ordinary text |
| planted | the same with a missing MLP (the layer that matters least) and with a rotation the other way round |
| ids 0 to 15 | all changes on the lowest token ids, most of them special tokens |
| norms, MLPs, rotations | a part and its replacement, on a random sample |
| seen keys | attention to windows, chunks and sinks, layer by layer, at the first long text |
| slots, fused blocks | a step of generation in slots and the text read whole |
| scorer | body and head run apart, and the model's own forward |
| extrapolation | short text, which a method must not change |
| self-test | the ways of a run, and texts read whole |
"""

import argparse
import contextlib
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from sbeval.model_adapters.generate.slots import served
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.prepare.change import Setting
from sbeval.model_adapters.prepare.changes import flex, mlps, norms, rotations, visible_keys
from sbeval.model_adapters.prepare.prepared import CHANGES
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.prepare.trial import Trial, rounding_limit
from sbeval.model_adapters.rope import RequestRope
from sbeval.models.extrapolation import parse_extrapolation
from sbeval.scoring import scorer
from sbeval.scoring.rounding import least, shares_apart

LONG_TOKENS = 1100  # beyond the shortest text whose attention is replaced
MOST_LAYERS = 8
METHODS = ("self_extend:8:512", "dual_chunk:1024:256", "sink_window:4:1024")
ON_GPU = Setting(replaces_modules=True)


class Table:
    """Rows of one checkpoint, printed as they come and once more together."""

    def __init__(self, model: str, dtype: str) -> None:
        self._begins, self._rows = (model, dtype), list[tuple[str, ...]]()
        print(f"\n## {model}, {dtype}\n", flush=True)

    def add(self, guard: str, statistic: str, value: Any, limit: Any = None, verdict: str | None = None) -> None:
        """Adds a row; without a verdict, a value above the limit is an alarm."""
        if verdict is None:
            numbers = isinstance(value, float) and isinstance(limit, float)
            verdict = ("passes" if value <= limit else "ALARM") if numbers else ""
        shown = [
            f"{each:.3g}" if isinstance(each, float) else "" if each is None else str(each) for each in (value, limit)
        ]
        row = (*self._begins, guard, statistic, *shown, verdict)
        self._rows.append(row)
        print("  ".join(row[2:]), flush=True)

    @contextlib.contextmanager
    def guarded(self, guard: str) -> Iterator[None]:
        """Turns an exception into a row."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:  # a guard that fails is a result, too
            self.add(
                guard, "error", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]
            )
            logging.getLogger(__name__).debug("%s", guard, exc_info=True)
        print(f"    ({guard}: {time.perf_counter() - began:.1f} s)", flush=True)

    def markdown(self) -> str:
        """Returns the rows as a table."""
        head = ("model", "dtype", "guard", "statistic", "value", "limit", "verdict")
        return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *self._rows))


def trial_rows(table: Table, model: Any, tokenizer: Any) -> None:
    """Each change alone, all of them, planted faults, and the lowest ids."""
    trial = Trial(model, tokenizer)
    if not trial.begin():
        table.add("trial", "no logits", trial.failure)
        return
    limit = trial.limit()
    table.add("trial", "least limit, from the dtype alone", trial.least)
    table.add("trial", "limit, from the model's rounding", limit)
    parts = [change for change in CHANGES if change.judged]
    for change in parts:
        if (undo := change.apply(model, ON_GPU)) is None:
            table.add("trial", f"{change.name}: nothing to change", None)
            continue
        try:
            table.add("trial", change.name, trial.difference(), limit)
        finally:
            undo()
    low = Trial(model, tokens=list(range(16)))
    low.begin()
    low_limit = low.limit()
    undos = [undo for change in parts if (undo := change.apply(model, ON_GPU)) is not None]
    try:
        table.add("trial", "all changes", trial.difference(), limit)
        table.add("ids 0 to 15", "all changes", low.difference(), low_limit)
    finally:
        for undo in reversed(undos):
            undo()
    table.add("trial", "all given back", trial.difference(), trial.least)


def planted_rows(table: Table, model: Any, tokenizer: Any) -> None:
    """Faults that have to be caught."""
    trial = Trial(model, tokenizer)
    trial.begin()
    limit = trial.limit()
    layers = list(model.base_model.layers)
    found = []
    for layer in layers[:: max(1, len(layers) // MOST_LAYERS)]:
        hook = layer.mlp.register_forward_hook(lambda _, __, output: torch.zeros_like(output))
        found.append(trial.difference())
        hook.remove()
    table.add(
        "planted", "missing MLP, least of its layers", min(found), limit, "CAUGHT" if min(found) > limit else "MISSED"
    )
    turned = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    hooks = [each.register_forward_hook(lambda _, __, angles: (angles[0], -angles[1])) for each in turned]
    difference = trial.difference()
    for hook in hooks:
        hook.remove()
    table.add(
        "planted", "rotation the other way round", difference, limit, "CAUGHT" if difference > limit else "MISSED"
    )


@torch.no_grad()
def part_rows(table: Table, model: Any) -> None:
    """Exact checks of single parts."""
    eps = torch.finfo(model.dtype).eps
    refused, worst = 0, 0.0
    for module in model.modules():
        if not type(module).__name__.endswith("RMSNorm") or isinstance(module, torch.nn.RMSNorm):
            continue
        if norms._fused_norm(module) is None:
            refused += 1
            continue
        plain = torch.nn.RMSNorm(
            len(module.weight), getattr(module, "variance_epsilon", None) or module.eps, device="meta"
        )
        plain.weight = module.weight
        x = 3.0 * torch.randn(1, 4, len(module.weight), generator=torch.Generator().manual_seed(0))
        x = x.to(module.weight.device, module.weight.dtype)
        expected, found = module(x), plain(x)
        share = (found - expected).abs() / expected.abs().clamp_min(eps * eps)
        worst = max(worst, float(share.max()) / eps)
    table.add(
        "norms", "largest error, in eps of the value", worst, float(norms._NORM_ULPS), f"{refused} kept as they are"
    )
    refused, worst = 0, 0.0
    for module in model.modules():
        if {"gate_proj", "up_proj", "down_proj"} <= {name for name, _ in module.named_children()}:
            fused_mlp = mlps._fused_mlp(module)
            refused += fused_mlp is None
            if fused_mlp is not None:
                x = torch.randn(1, 4, module.gate_proj.weight.shape[1], generator=torch.Generator().manual_seed(0))
                x = x.to(module.gate_proj.weight.device, module.gate_proj.weight.dtype)
                expected = module(x)
                share = (fused_mlp(x) - expected).abs().max() / expected.abs().max()
                worst = max(worst, float(share) / eps)
    limit = 8.0 if model.dtype.itemsize < 4 else 8 * eps**-0.25
    table.add("MLPs", "largest error, in eps of the largest value", worst, limit, f"{refused} kept as they are")
    file = sys.modules[type(model).__module__]
    rotate = getattr(file, "apply_rotary_pos_emb", None)
    known = rotate is not None and rotations.turns_halves(rotate)
    table.add("rotations", "turns halves (1e-5, in fp32 on random numbers)", str(known))


@torch.no_grad()
def seen_rows(table: Table, model: Any, tokenizer: Any) -> None:
    """Adds the result of each layer's check at its first long text."""
    ratios: list[tuple[float, float]] = []
    original = visible_keys._same

    def recording(attend: Any, own: Any, heads: list[torch.Tensor], mask: Any) -> bool:
        wide = [x.double() if x.dtype == torch.float64 else x.float() for x in heads]
        expected, definition = own(*wide, mask)[0], attend(*wide).transpose(1, 2)
        rounded = attend(*heads).transpose(1, 2).to(definition.dtype)
        for rows in (slice(None), slice(-visible_keys._COMPARED_TOKENS, None)):
            first = (definition[:, rows] - expected[:, rows]).abs().max() / expected[:, rows].abs().max()
            second = (rounded[:, rows] - definition[:, rows]).abs().max() / definition[:, rows].abs().max()
            ratios.append((float(first), float(second)))
        return original(attend, own, heads, mask)

    undo = visible_keys.see_keys(model)
    if undo is None:
        table.add("seen keys", "no windows, chunks or sinks", None)
        return
    try:
        visible_keys._same = recording
        ids = torch.tensor(sample_tokens(tokenizer, model.get_input_embeddings().weight.shape[0], LONG_TOKENS))
        model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        visible_keys._same = original
        notes = visible_keys.notes(model)
        undo()
    eps = torch.finfo(model.dtype).eps
    table.add("seen keys", "definition in fp32, largest of all layers", max(r[0] for r in ratios), visible_keys._SAME)
    table.add("seen keys", "kernel, largest of all layers", max(r[1] for r in ratios), max(visible_keys._SAME, 8 * eps))
    table.add("seen keys", "layers compared", str(len(ratios) // 2), None, "; ".join(notes) or "all used")


@contextlib.contextmanager
def compared_logits(place: Any) -> Iterator[list[tuple[float, float]]]:
    """Records the difference and the limit of every `same_logits` that a module asks for."""
    rows: list[tuple[float, float]] = []
    original = place.same_logits

    def recording(model: Any, read: Callable[[], Any], found: Any) -> bool:
        with torch.no_grad():
            expected = read()
        smallest = least(expected.dtype, expected.device)
        difference = float(shares_apart(found, expected).mean())
        rows.append((difference, max(smallest, rounding_limit(model, read, expected))))
        return bool(original(model, read, found))

    place.same_logits = recording
    try:
        yield rows
    finally:
        place.same_logits = original


def slot_rows(table: Table, model: Any, tokenizer: Any) -> None:
    """Compares decode steps with whole texts."""
    held = SimpleNamespace(model=model, tokenizer=tokenizer, mixed_precision_dtype=None)
    for guard, ask in (
        ("slots", lambda: served.why_not_model(held)),
        ("fused blocks", lambda: "" if served.fused_blocks(model, tokenizer) is not None else "not used"),
    ):
        with table.guarded(guard), compared_logits(served) as rows:
            reason = ask()
            for difference, limit in rows or [(None, None)]:
                alarm = "" if difference is None else "passes" if difference <= limit else "ALARM"
                table.add(guard, "a step beside the whole text", difference, limit, reason or alarm)


def scorer_rows(table: Table, model: Any, tokenizer: Any) -> None:
    """Compares running body and head separately: the largest error, and 8 eps of the largest logit."""
    values: list[tuple[float, float]] = []
    original = scorer.same_but_for_rounding

    def recording(result: torch.Tensor, expected: torch.Tensor) -> bool:
        rounding = torch.finfo(expected.dtype).eps ** (1.0 if expected.dtype.itemsize < 4 else 0.75)
        largest = float(expected.double().abs().max())
        values.append((float((result.double() - expected.double()).abs().max()) / largest, 8 * rounding))
        return bool(original(result, expected))

    scorer.same_but_for_rounding = recording
    try:
        scored = scorer.TokenScorer(model)
        ids = torch.tensor(sample_tokens(tokenizer, model.get_input_embeddings().weight.shape[0], 64))[None]
        with torch.no_grad():
            scored._reproduces_logits(ids.to(model.device))
    finally:
        scorer.same_but_for_rounding = original
    for value, limit in values:
        table.add("scorer", "largest error, as a share of the largest logit", value, limit)


def rope_rows(table: Table, model: Any, tokenizer: Any) -> None:
    """Methods of extrapolation on a text that they must not change."""
    from sbeval.model_adapters import rope

    for method in METHODS:
        with table.guarded(f"extrapolation {method}"), compared_logits(rope) as rows:
            reason = ""
            try:
                RequestRope(model, None, None, parse_extrapolation(method), tokenizer)
            except Exception as error:
                reason = str(error).splitlines()[0][:110]
            for difference, limit in rows or [(None, None)]:
                alarm = "" if difference is None else "passes" if difference <= limit else "ALARM"
                table.add("extrapolation", method, difference, limit, reason or alarm)


def self_test_rows(table: Table, model: Any, tokenizer: Any, device: str) -> None:
    """Adds the self-test's result as in a run, and the changes that a run would undo."""
    lm = StickBreakingLM(model, tokenizer=tokenizer, device=device, batch_size=1)
    assert lm.session is not None
    outcome = lm.session.self_test
    table.add(
        "run",
        "changes kept",
        str(len(lm.prepared.kept)),
        None,
        "; ".join(lm.prepared.to_json()["notes"]) or "none undone",
    )
    if outcome.untested is not None:
        table.add("self-test", "not tested", outcome.untested)
    for name, check in outcome.checks.items():
        verdict = "passes" if check.passed else "ALARM"
        table.add(
            "self-test",
            name,
            check.difference if check.difference is not None else check.reason,
            outcome.rounding,
            verdict,
        )
    lm.prepared.give_back()


def flex_rows(table: Table, model: Any) -> None:
    """flex_attention is chosen by name; nothing is compared."""
    made = flex.settle_flex_attention(model, ON_GPU) is not None
    table.add("flex", "attention replaced (no comparison)", str(made))


def measure(folder: Path, weights: str, dtype: str, device: str) -> str:
    """Prints the rows of one checkpoint and returns them as a table."""
    table = Table(f"{folder.name}{'' if weights == 'real' else ', random weights'}", dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = getattr(torch, dtype)
    if weights == "real":
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    else:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=kind
        )
    model = model.eval().to(device)
    for guard, rows in (
        ("trial", lambda: trial_rows(table, model, tokenizer)),
        ("planted", lambda: planted_rows(table, model, tokenizer)),
        ("parts", lambda: part_rows(table, model)),
        ("seen keys", lambda: seen_rows(table, model, tokenizer)),
        ("slots", lambda: slot_rows(table, model, tokenizer)),
        ("scorer", lambda: scorer_rows(table, model, tokenizer)),
        ("extrapolation", lambda: rope_rows(table, model, tokenizer)),
        ("flex", lambda: flex_rows(table, model)),
        ("self-test", lambda: self_test_rows(table, model, tokenizer, device)),
    ):
        with table.guarded(guard):
            rows()
    return table.markdown()


def main() -> None:
    """Measures every checkpoint and prints one table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="one or several, with commas")
    parser.add_argument("--weights", default="real,random")
    parser.add_argument("--out", type=Path, default=None, help="a file for the table")
    asked = parser.parse_args()
    tables = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SBEVAL_CACHE"] = cache  # no self-test of an earlier run
        for folder in asked.folders:
            for dtype in asked.dtype.split(","):
                for weights in asked.weights.split(","):
                    try:
                        tables.append(measure(folder, weights, dtype, asked.device))
                    except Exception as error:
                        tables.append(f"{folder.name}, {weights}, {dtype}: {type(error).__name__}: {error}")
                    gc.collect()
                    if asked.device.startswith("cuda"):
                        torch.cuda.empty_cache()
                    if asked.out is not None:
                        asked.out.write_text("\n\n".join(tables) + "\n")
    device = torch.cuda.get_device_name() if asked.device.startswith("cuda") else "CPU"
    print(f"\n{device}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("\n\n".join(tables))


if __name__ == "__main__":
    main()
