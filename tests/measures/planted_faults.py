"""Plants one fault after another in the product and counts those that `make test` notices; run it as a script.

`--exhaustive` runs every test, as `make test-all` does.

A fault is a piece of code that stands once in the product and what it is replaced by, so moving code to another file
does not lose it. The file is written back whatever happens. `tests/test_planted_faults.py` checks that each can be
planted.
"""

import argparse
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from sbeval.processes.signals import raising_on_signals

ROOT = Path(__file__).parents[2]
ROOMS = ("sbeval", "tasks", "model_adapters", "reports")


class Fault(NamedTuple):
    """One fault: the tests that should notice it, the code, and the wrong code."""

    tests: str
    code: str
    wrong: str


FAULTS = {
    "a query sees the key after it": Fault(
        "attention/test_definition.py",
        "allowed_QK.tril(keys - queries - (0 if attend_current else 1))",
        "allowed_QK.tril(keys - queries - (-1 if attend_current else 0))",
    ),
    "a key's own stick is taken twice": Fault(
        "attention/test_definition.py", "from_key_BHQK[..., 1:], (0, 1)", "from_key_BHQK[..., :-1], (1, 0)"
    ),
    "blocks of rows forget the older remainder": Fault(
        "attention/test_older_blocks.py attention/test_implementations.py",
        "return (log_weights_BHQK.exp() @ v_BHKD).to(q_BHQD.dtype), log_remainder_BHQ.exp()",
        "return (log_weights_BHQK.exp() @ v_BHKD).to(q_BHQD.dtype), log_remainder_BHQ.exp() * 0.999",
    ),
    "FIRE's share is of the distance alone": Fault(
        "models/test_softmax.py",
        "log_distance_RC = (scale * distance_RC.clamp_min(0)).log1p()",
        "log_distance_RC = scale * distance_RC.clamp_min(0)",
    ),
    "RoPE turns the second half the other way": Fault(
        "models/test_rope.py models/test_decoder.py",
        "(second_BHLF * cos_B1LF + first_BHLF * sin_B1LF).to(dtype)",
        "(second_BHLF * cos_B1LF - first_BHLF * sin_B1LF).to(dtype)",
    ),
    "RoPE's exponent counts from two": Fault(
        "models/test_rope.py", "exponent_F = torch.arange(0, rotated, 2", "exponent_F = torch.arange(2, rotated + 2, 2"
    ),
    "a scaling's original length is the request's": Fault(
        "models/test_rope.py",
        'original = int(rope_parameters.get("original_max_position_embeddings") or original_length_tokens)',
        "original = int(original_length_tokens)",
    ),
    "a module's scaling starts from its longest length": Fault(
        "models/test_rope.py model_adapters/rope",
        "scaled = frequencies(parameters, original_length_tokens=original, length_tokens=length_tokens)",
        "scaled = frequencies(parameters, original_length_tokens=longest, length_tokens=length_tokens)",
    ),
    "attributes of a request stay in the model": Fault(
        "models/test_rope.py model_adapters/rope",
        "for name, value in before.items():\n            setattr(module, name, value)",
        "for name, value in list(before.items())[:1]:\n            setattr(module, name, value)",
    ),
    "an error behind a prefix counts from it": Fault(
        "scoring/test_scorer.py",
        "prefix_tokens = 0 if after is None else int(after.get_seq_length())",
        "prefix_tokens = 0",
    ),
    "scores of a learned prompt are shifted": Fault(
        "model_adapters/test_hf_arguments.py", "positions = positions + skipped", "positions = positions"
    ),
    "a window begins one token late": Fault(
        "corpora/test_windows.py",
        "begin = start + longest + candidate * targets",
        "begin = start + longest + candidate * targets + 1",
    ),
    "a stream's blocks overlap": Fault(
        "corpora/test_windows.py tasks/perplexity",
        "range(longest + targets, total + 1, longest)",
        "range(longest + targets, total + 1, longest // 2)",
    ),
    "the last position bin is always kept": Fault(
        "corpora/test_windows.py", "(first[-1] - first[-2]) / 2", "(first[-1] - first[-2]) / 99"
    ),
    "a lead-in is not its document's": Fault(
        "corpora/test_windows.py", "if lead_in and window.start != int(starts[document]):", "if lead_in:"
    ),
    "bits per byte are nats": Fault("tasks/perplexity", "nats / math.log(2)", "nats"),
    "rows of a document are not added up": Fault(
        "tasks/perplexity",
        "sums.get(name, np.zeros(columns)) + np.asarray(values, np.float64)",
        "np.asarray(values, np.float64)",
    ),
    "key tokens of all targets": Fault(
        "tasks/perplexity/test_longppl.py",
        "chosen = nll[self.windows(doc, length)[0]][mask]",
        "chosen = nll[self.windows(doc, length)[0]]",
    ),
    "too many targets a window": Fault(
        "tasks/perplexity",
        "return self.settle_full_windows(targets=self.targets_per_window())",
        "return self.settle_full_windows(targets=1)",
    ),
    "resamples ignore the weights": Fault(
        "reports/test_statistics.py reports/test_judge.py",
        "residuals_CK = differences_CK - estimates_K * weights_CW",
        "residuals_CK = differences_CK - estimates_K",
    ),
    "a band is half as wide": Fault(
        "reports/test_statistics.py",
        "below, above = np.maximum(width, sides_2).tolist()",
        "below, above = (np.maximum(width, sides_2) / 2).tolist()",
    ),
    "Wilson's middle is the share": Fault(
        "reports/test_statistics.py reports/test_ruler.py",
        "(shares + _Z**2 / (2 * counts)) / (1 + _Z**2 / counts)",
        "shares",
    ),
    "agreeing samples pass for certainty": Fault(
        "reports/test_statistics.py reports/test_judge.py",
        "/ total * count + 2) / (count + 2)",
        "/ total * count) / count",
    ),
    "prompts are cut on the right": Fault(
        "model_adapters",
        "Prompt(index, np.asarray(tokens[cut:], dtype=np.int64), setting, cut, beginning)",
        "Prompt(index, np.asarray(tokens[: len(tokens) - cut], dtype=np.int64), setting, cut, beginning)",
    ),
    "a context's last token is fed as well": Fault(
        "model_adapters", "tuple((context + continuation)[cut:-1])", "tuple((context + continuation)[cut:])"
    ),
    "needed room is one token short": Fault(
        "model_adapters",
        "needed = [len(context) + len(continuation) - 1 for",
        "needed = [len(context) + len(continuation) - 2 for",
    ),
    "a stop sequence is searched in new tokens alone": Fault(
        "model_adapters/generate model_adapters/test_generation.py",
        "recent = self._tokenizer.decode(tokens[max(0, looked + 1 - farthest) :])",
        "recent = self._tokenizer.decode(tokens[looked:])",
    ),
    "budgets ignore the answer": Fault(
        "tasks/ruler", "return self.context_length - self.task.generator.generated_tokens", "return self.context_length"
    ),
    "inexact counts are believed": Fault("tasks/ruler", "if count != tokens[i]}", "if count > 2 * tokens[i]}"),
    "the answer is another chain": Fault(
        "tasks/ruler",
        "references=chains[0],\n            answer_prefix=self._wording.answer_prefix.format(query=values[0], num_v",
        "references=chains[-1],\n            answer_prefix=self._wording.answer_prefix.format(query=values[0], num_v",
    ),
    "a needle's value is another key's": Fault(
        "tasks/ruler", "values_of = {key: values[i * per_key :][:per_key]", "values_of = {key: values[0:][:per_key]"
    ),
    "depths are of another sample": Fault(
        "tasks/ruler", "fractions[first] = depths[index % len(depths)] / 100", "fractions[first] = depths[0] / 100"
    ),
    "training windows overlap by a window": Fault(
        "training/test_windows.py",
        "start = self._offset + int(self._order[window]) * self._length_tokens",
        "start = self._offset + int(self._order[window])",
    ),
    "documents see the one before": Fault(
        "training", "begins[:, 0] = True\n", "begins[:, :] = False\n    begins[:, 0] = True\n"
    ),
    "the mean is over segments": Fault(
        "training", "return total / (window_tokens.shape[0] * longest)", "return total / len(buckets)"
    ),
    "a changed file keeps its hash": Fault(
        "keeping",
        "stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns",
        "stat.st_dev, stat.st_ino, stat.st_size, stat.st_size, stat.st_size",
    ),
    "a checkpoint's missing tensors are left random": Fault(
        "checkpoints/test_load.py", 'missing = sorted(info["missing_keys"])', "missing: list[str] = []"
    ),
    "a shard may lie elsewhere": Fault("checkpoints", 'and ".." not in path.parts', "and True"),
    "a tensor of another shape is taken": Fault(
        "checkpoints", "if tuple(tensor.shape) != shape:", "if tensor.dim() != len(shape):"
    ),
    "NaN is a score": Fault(
        "scoring model_adapters/runs/test_non_finite.py",
        "logprobs[~logprobs.isfinite()] = torch.nan",
        "logprobs[~logprobs.isfinite()] = 0.0",
    ),
}


@functools.cache
def sources() -> dict[Path, str]:
    """The product's source files and their texts, before any fault is planted."""
    files = (file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    return {file: file.read_text(encoding="utf-8") for file in files}


def places_of(fault: Fault) -> list[Path]:
    """Returns the file of each place where the fault's code stands."""
    return [file for file, text in sources().items() for _ in range(text.count(fault.code))]


def why_not_planted(fault: Fault) -> str | None:
    """Returns why a fault cannot be planted, or None: its code has to stand in one place, and its tests must exist."""
    places = places_of(fault)
    if len(places) != 1:
        return f"its code stands in {len(places)} places instead of one: {fault.code}"
    missing = [test for test in fault.tests.split() if not (ROOT / "tests" / test).exists()]
    return f"there are no tests at {', '.join(missing)}" if missing else None


def noticed(fault: Fault, *, exhaustive: bool = False) -> bool:
    """Whether the fault's tests fail while it is planted: those of `make test`, or all of them if `exhaustive`."""
    (file,) = places_of(fault)
    right = sources()[file]
    file.write_text(right.replace(fault.code, fault.wrong), encoding="utf-8")
    tests = [f"tests/{place}" for place in fault.tests.split()]
    chosen = [] if exhaustive else ["-m", "not exhaustive"]
    with raising_on_signals():
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *chosen, *tests],
                cwd=ROOT,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
                capture_output=True,
                text=True,
            )
        finally:
            file.write_text(right, encoding="utf-8")
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return ended.returncode == 1


def main() -> None:
    """Prints a line a fault and the count; `--find` only looks for each fault's code.

    No fault is planted if one of those chosen cannot be: the exit code is then 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--find", action="store_true", help="only say where each fault's code stands")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some faults; all, if none is named")
    parser.add_argument("--exhaustive", action="store_true", help="run every test")
    chosen = parser.parse_args()
    names = chosen.names or list(FAULTS)
    if reasons := {name: reason for name in names if (reason := why_not_planted(FAULTS[name]))}:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))
    if chosen.find:
        for name in names:
            print(f"{places_of(FAULTS[name])[0].relative_to(ROOT)}: {name}")
        return
    results = {}
    for name in names:
        results[name] = noticed(FAULTS[name], exhaustive=chosen.exhaustive)
        print(f"{'noticed' if results[name] else 'MISSED '}  {name}", flush=True)
    print(f"{sum(results.values())} of {len(results)} faults noticed")


if __name__ == "__main__":
    main()
