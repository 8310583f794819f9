"""What users write: recipes, sweeps, configurations of lm-eval, metadata, arguments of the model; and YAML's own traps.

The numbers are the settings as read, which is what a run records and repeats: they are named as changed where what is
recorded differs. A value of another kind that is read all the same must be the number that its text writes (`"64"` for
64, `3e-3`, which YAML calls text, for 0.003), a list of one for one, or be written down as it was given.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from sbeval.harness.options import asked, parse
from sbeval.model_adapters.open.arguments import check_shared_arguments
from sbeval.model_adapters.options import AdapterOptions
from sbeval.models import SbevalConfig
from sbeval.sweep.command import load_sweep
from sbeval.sweep.definition import plan
from sbeval.tasks.metadata import TaskOptions
from sbeval.tasks.perplexity.options import PerplexityOptions
from sbeval.tasks.recall.options import FlipFlopOptions, MqrarOptions
from sbeval.tasks.ruler.options import NiahOptions
from sbeval.training.recipe import Extension, read_recipe
from tests.fuzz.mutations import ABSENT, Change, changed_bytes, changed_tree, put_in_place_of, same_kind
from tests.fuzz.outcomes import Silent

Tree = dict[str, Any]
OPTIMIZATION = {
    **{"learning_rate": 0.003, "total_tokens": 6400, "batch_tokens": 64, "micro_batch_tokens": 32, "warmup_steps": 10},
    **{"schedule": "cosine", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "gradient_clip": 1.0},
}
RECIPE: Tree = {
    "name": "small",
    "model": {
        **{"vocab_size": 53, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "attention": "rope"},
        **{"num_attention_heads": 4, "training_length_tokens": 32, "norm_eps": 1e-6, "bias": ["qkv"]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "data": {"folder": "data", "recall_share": 0.25, "seed": 3, "validation_tokens": 64, "allow_repeat": True},
    "optimization": OPTIMIZATION,
    **{"precision": "float32", "seed": 1, "log_every_steps": 5, "save_every_steps": 7},
}
SWEEP: Tree = {
    "output": "out",
    "checkpoints": [
        "models/sb",
        {"pretrained": "models/rope", "label": "rope dynamic", "model_args": {"rope_scaling": "dynamic:4"}},
    ],
    "runs": [
        {"name": "stream", "tasks": ["sb_stdlib_stream"], "context_lengths": [1024, 4096], "limit": 3},
        {"name": "mmlu", "tasks": "mmlu", "num_fewshot": 5, "metadata": {"seed": 7}, "lengths_apart": False},
    ],
    **{"model_args": {"dtype": "bfloat16", "max_length": 4096}, "metadata": {"seed": 7}, "limit": 10},
    **{"batch_size": "auto:4", "device": "cpu", "launcher": ["accelerate", "launch"]},
}
CONFIGURATION: Tree = {
    **{"model": "sb", "model_args": {"pretrained": "nowhere", "dtype": "float32"}, "tasks": ["sb_stdlib_stream"]},
    **{"metadata": {"context_lengths": [256, 512]}, "limit": 2, "output_path": "out", "num_fewshot": 0},
}
EXTENSION: Tree = {
    **{"checkpoint": "models/sb", "data": "text", "context_tokens": 32, "documents": "joined"},
    **{"rope_scaling": "dynamic:4", "allow_repeat": True, "gradient_checkpointing": False, "seed": 2},
    "optimization": OPTIMIZATION,
}
METADATA: dict[type[TaskOptions], Tree] = {
    PerplexityOptions: {
        **{"context_lengths": [256, 512], "max_length": 4096, "data_path": "text", "bos": "text", "separator": "\n"},
        **{"targets_per_window": 64, "stride": 128, "context": "stream", "sb_task": {"seed": 5}, "seed": 1},
    },
    MqrarOptions: {"context_lengths": [256], "num_samples": 10, "seed": 3, "sb_task": {"num_samples": 5}},
    FlipFlopOptions: {"context_lengths": [256], "num_samples": 10, "seed": 3},
    NiahOptions: {
        **{"type_haystack": "noise", "type_needle_k": "words", "type_needle_v": "numbers", "num_samples": 4},
        **{"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1, "context_lengths": [512]},
    },
}
MODEL_ARGS: Tree = {
    **{"training_length": 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32}},
    **{"kernels": "reference", "skip_threshold": 0.001, "max_batch_tokens": 4096, "kv_expand": "tile"},
    **{"extrapolation": "self_extend:8:512"},
    **{"truncation": "error", "dtype": "float32", "max_length": 2048, "batch_size": "auto", "device": "cpu"},
}


def _chain(first: str, line: str) -> str:
    """YAML in which each name is made of the one before it several times over."""
    names = "abcdefghijklmno"
    return first + "".join(line.replace("B", b).replace("*A", f"*{a}") for a, b in itertools.pairwise(names))


TRAPS = (
    _chain("a: &a [x, x, x, x, x, x, x, x, x]\n", f"B: &B [{', '.join(['*A'] * 9)}]\n"),
    _chain("a: &a {x: 1}\n", "B: &B {p: *A, q: *A, r: *A}\n"),
    "a: &a\n  b: *a\n",
    "- &a [*a, *a]\n",
    _chain("a: &a {k0: 1}\n", f"B: &B\n  <<: [{', '.join(['*A'] * 9)}]\n"),
    "a: " + "[" * 100_000,
    "a: " + "{a: " * 50_000,
    "- " * 50_000 + "x\n",
    "".join(" " * i + "a:\n" for i in range(3000)),
    *("seed: 1\nseed: 2\n", "seed: 2020-13-45\n", "seed: 2020-01-01\n", f"seed: {'9' * 5000}\n", "seed: 1:2:3\n"),
    *("!!python/object/apply:os.system ['true']\n", "seed: !!binary aGk=\n", "? [a, b]\n: 1\n", "? {a: 1}\n: 1\n"),
    *("seed: !!set {a, b}\n", "seed: .nan\n", "seed: .inf\n", "seed: 0o17\n", "%YAML 3.0\n---\na: 1\n"),
    *("a: 1\n---\nb: 2\n", "{1: 2, null: 3}\n", "~: 1\n", "seed: !!int ''\n", "seed: !!float x\n", "\x00"),
    *("seed: \ud83d\n", "<<: 1\n", "=: 1\n"),
)


def _recipe(file: Path, tree: Tree | None) -> Any:
    recipe = read_recipe(file)
    return [recipe.model_dump(mode="json"), SbevalConfig(**recipe.model).to_dict()]


def _sweep(file: Path, tree: Tree | None) -> Any:
    return [dataclasses.asdict(run)["config"] for run in plan(load_sweep(file))]


def _extension(file: Path, tree: Tree | None) -> Any:
    return Extension.read(tree, place="the extension", source="the command line").model_dump(mode="json")


def _model_args(file: Path, tree: Tree | None) -> Any:
    arguments = dict(tree or {})
    options = AdapterOptions.pop(arguments)
    check_shared_arguments(arguments, options)
    return [options.model_dump(mode="json"), arguments]


def _metadata(kind: type[TaskOptions]) -> Callable[[Path, Tree | None], Any]:
    return lambda file, tree: kind.of_task("sb_task", tree or {}).model_dump(mode="json")


# what is read from a file, and what is handed over as a mapping
FILES: dict[str, tuple[Tree, Callable[[Path, Tree | None], Any]]] = {
    "recipe": (RECIPE, _recipe),
    "sweep": (SWEEP, _sweep),
    "configuration": (CONFIGURATION, lambda file, tree: asked(vars(parse(["--config", str(file)])))),
}
MAPPINGS: dict[str, tuple[Tree, Callable[[Path, Tree | None], Any]]] = {
    "extension": (EXTENSION, _extension),
    "model_args": (MODEL_ARGS, _model_args),
    **{kind.__name__: (tree, _metadata(kind)) for kind, tree in METADATA.items()},
}
NAMES = [*FILES, *MAPPINGS]


def fuzz(what: str, rng: Random, folder: Path) -> str:
    tree, read = {**FILES, **MAPPINGS}[what]
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    before = _written(read(file, tree))
    damaged, changes = changed_tree(tree, rng)
    draw = rng.random()
    if what in MAPPINGS or draw < 0.6:
        file.write_text(yaml.safe_dump(json.loads(json.dumps(damaged))), encoding="utf-8")
    else:
        changes = []
        if draw < 0.75:
            file.write_bytes(changed_bytes(file.read_bytes(), rng))
        elif draw < 0.95:
            trap = rng.choice(TRAPS).encode(errors="surrogatepass")
            file.write_bytes(rng.choice([trap, file.read_bytes() + trap, trap + file.read_bytes()]))
        else:
            put_in_place_of(file, rng)
    after = read(file, damaged)
    if _written(after) == before:
        return "equal"
    if len(changes) == 1:
        _check_read_as_written(changes[0], after)
    elif not changes:
        _check_read_as_a_library_does(file, read, after)
    return "named"


def _check_read_as_a_library_does(file: Path, read: Callable[[Path, Tree | None], Any], settings: Any) -> None:
    """Raises `Silent` where a damaged text was read as something else than PyYAML reads in it."""
    tree = yaml.safe_load(file.read_bytes())
    again = file.with_name("again.yaml")
    again.write_text(yaml.safe_dump(tree), encoding="utf-8")
    if (meant := _written(read(again, tree))) != _written(settings):
        raise Silent(f"{file.read_bytes()[:2000]!r} was read as {_written(settings)[:500]} and means {meant[:500]}")


def _written(settings: Any) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _check_read_as_written(change: Change, settings: Any) -> None:
    """Raises `Silent` where a value of another kind was read as something that nobody wrote."""
    # `truncation` alone takes false for "left", as hf has it
    if change.new == ABSENT or same_kind(change.old, change.new) or change.path == ("truncation",):
        return
    meant = [change.new, [change.new], str(change.new)]
    if isinstance(change.new, str):
        for number in (int, float):
            try:
                meant.append(number(change.new))
            except ValueError:
                continue
        meant.append([part.strip() for part in change.new.split(",")])
    found = list(_all_within(settings))
    if not any(_same(one, value) for one in meant for value in found):
        raise Silent(f"{change}: {_written(settings)[:500]}")


def _all_within(value: Any) -> Any:
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        yield from _all_within(one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other or (isinstance(one, list) and isinstance(other, tuple) and one == list(other)))
