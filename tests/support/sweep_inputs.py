"""Sweeps whose runs a test launcher executes: plain ones, and one that depends on every kind of input."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import sweep_launcher
import yaml

from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun

SHARD = "weights" * 1000
CODE = {"AutoModel": "someone/code--m.Model"}
GENERATION = {"repetition_penalty": 1.0, "eos_token_id": 1, "suppress_tokens": [5]}
WEIGHTS = {"a": "model-1.safetensors", "b": "parts/model-2.safetensors"}
TASK = """
include: base.yaml
task: t
tag: [mine]
dataset_path: json
dataset_kwargs: {data_files: {test: own.jsonl}}
doc_to_text: !function utils.text
"""


def stub_sweep(output: Path | str, *checkpoints: str, behaviour: str = "write", **changes: Any) -> Sweep:
    """Returns a sweep of one run `t` over checkpoints; `changes` are other settings of the sweep."""
    settings: dict[str, Any] = {
        "checkpoints": tuple(SweepCheckpoint(pretrained=name) for name in checkpoints or ("one",)),
        "runs": (SweepRun(name="t", tasks=("t",)),),
        "launcher": (sys.executable, str(sweep_launcher.__file__), behaviour),
    }
    return Sweep(output=str(output), **(settings | changes))


def stub_command(folder: Path, *checkpoints: str, behaviour: str = "write") -> list[str]:
    """Writes that sweep to a file, with its output in `out` beside it, and returns the command that runs it."""
    settings = {"output": str(folder / "out"), "runs": [{"name": "t", "tasks": ["t"]}]}
    settings |= {"checkpoints": [*checkpoints]} if checkpoints else {}
    settings["launcher"] = [sys.executable, str(sweep_launcher.__file__), behaviour]
    (folder / "out").mkdir(exist_ok=True)
    (folder / f"{behaviour}.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return [sys.executable, "-P", "-m", "sbeval", "sweep", str(folder / f"{behaviour}.yaml")]


def lines(file: Path) -> list[str]:
    """Returns the lines of a file, none if it does not exist yet."""
    return file.read_text().splitlines() if file.exists() else []


def wait_for(file: Path, count: int = 0) -> None:
    """Waits until a file exists and has so many lines."""
    last = time.monotonic() + 300
    while not file.exists() or len(lines(file)) < count:
        assert time.monotonic() < last, f"{file} has {len(lines(file))} lines"
        time.sleep(0.02)


def write_inputs(folder: Path) -> None:
    """Writes all inputs that `sweep_over` names, and other files that no number depends on."""
    texts = {
        "ckpt/config.json": json.dumps({"model_type": "own", "rope_theta": 1e4, "auto_map": CODE}),
        "ckpt/generation_config.json": json.dumps(GENERATION),
        "ckpt/tokenizer.json": json.dumps({"model": {"vocab": {"a": 0}, "merges": [["a", "b"]]}}),
        "ckpt/tokenizer_config.json": json.dumps({"split_special_tokens": False, "add_bos_token": False}),
        "ckpt/special_tokens_map.json": json.dumps({"bos_token": "<s>"}),
        "ckpt/chat_template.jinja": "{{ messages }}",
        "ckpt/vocab.txt": "a\n",
        "ckpt/merges.txt": "a b\n",
        "ckpt/modeling_own.py": "SCALE = 1\n",
        "ckpt/layers/norm.py": "EPSILON = 1\n",
        "ckpt/model.safetensors.index.json": json.dumps({"weight_map": WEIGHTS}),
        "ckpt/README.md": "about",
        "ckpt/training_record.json": "{}",
        "ckpt/logs/events.out": "x",
        "adapter/adapter_config.json": json.dumps({"r": 2}),
        "tokenizer/tokenizer.json": json.dumps({"model": {"merges": [["c", "d"]]}}),
        "evaluator/config.json": json.dumps({"model_type": "llama"}),
        "tasks/own.yaml": TASK,
        "tasks/base.yaml": "output_type: generate_until\n",
        "tasks/utils.py": "def text(doc): return doc['text']\n",
        "tasks/others/other.yaml": "task: other\n",
        "matched/some.yaml": "task: matched\n",
        "comma/one.yaml": "task: one\ninclude: ../tasks/base.yaml\n",
        "comma/two.yaml": "task: two\n",
        "given/three.yaml": "task: three\n",
        "own.jsonl": '{"text": "one"}\n',
        "texts/a.txt": "one text\n",
        "texts/b.jsonl": '{"text": "another"}\n',
        "hub/models--someone--delta/refs/main": "a" * 40,
        "hub/models--someone--code/refs/main": "c" * 40,
        "hub/datasets--someone--questions/refs/main": "b" * 40,
    }
    shards = ["ckpt/model-1.safetensors", "ckpt/parts/model-2.safetensors", "ckpt/tokenizer.model"]
    shards += ["adapter/adapter_model.safetensors", "evaluator/model.safetensors"]
    for name, content in {**texts, **dict.fromkeys(shards, SHARD), "ckpt/another.safetensors": "other"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    pq.write_table(pa.table({"text": ["rows"]}), folder / "texts/c.parquet")


def sweep_over(folder: Path, **changes: Any) -> Sweep:
    """Returns a sweep of one run over what `write_inputs` wrote there.

    What changes is a setting of the sweep, or of its run or model by a name such as "run.num_fewshot".
    """

    def given(prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}

    metadata = {"data_path": str(folder / "texts"), "longppl_evaluator": str(folder / "evaluator"), "seed": 1}
    metadata["dataset"] = "someone/questions"
    model = {name: str(folder / place) for name, place in (("peft", "adapter"), ("cache_dir", "hub"))}
    model |= {"delta": "someone/delta", "tokenizer": str(folder / "tokenizer"), "dtype": "float32"}
    checkpoint = {"pretrained": str(folder / "ckpt"), "label": "one", **given("checkpoint.")}
    tasks = ("t", "matched/*.yaml", "comma/one.yaml,comma/two.yaml", "given")
    run: dict[str, Any] = {"name": "r", "tasks": tasks, "context_lengths": (64, 128), **given("run.")}
    return Sweep(
        checkpoints=(SweepCheckpoint(model_args={**model, **given("model.")}, **checkpoint),),
        runs=(SweepRun(metadata={**metadata, **given("metadata.")}, **run),),
        output=str(folder / "results"),
        include_path=str(folder / "tasks"),
        launcher=(sys.executable, str(sweep_launcher.__file__), "write"),
        **{name: value for name, value in changes.items() if "." not in name},
    )


TINY_TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [a, b]
doc_to_target: 0
"""
