"""The commands that `kills.py` kills: their inputs, and how their outputs are compared."""

import collections
import contextlib
import hashlib
import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "sbeval" / "demo" / "checkpoints" / "stickbreaking"
TINY = {
    **{"attention": "stickbreaking", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "training_length_tokens": 64},
}
_BUILT = re.compile(rb"Built [^.]*\.")


class Command(NamedTuple):
    """A command to be killed."""

    name: str
    arguments: Callable[[Path], list[str]]
    """Behind `sbeval`, for a folder that holds what `prepare` put there."""
    prepare: Callable[[Path], None]
    left: Callable[[Path], dict[str, str]]
    """What counts of what it leaves, by name."""
    workers: bool = False
    """Whether the processes that it starts are killed in its place; it names them, and ends with 1."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files(folder: Path) -> Iterator[Path]:
    """Returns every file below a folder, except those in unfinished folders that a kill left."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and ".part" not in str(path))


def whole(folder: str) -> Callable[[Path], dict[str, str]]:
    """Compares every file, except those that contain the time; compares the page without its time."""

    def left(work: Path) -> dict[str, str]:
        dated = (".sha256", "training_record.json", ".pdf")
        found = [file for file in files(work / folder) if not file.name.endswith(dated)]
        return {str(file.relative_to(work)): sha256(_BUILT.sub(b"", file.read_bytes())) for file in found}

    return left


def scores(folder: str) -> Callable[[Path], dict[str, str]]:
    """Compares the numbers of results files and all samples: several files of one model and task must be equal."""

    def left(work: Path) -> dict[str, str]:
        found = collections.defaultdict(set)
        for file in files(work / folder):
            if file.match("results_*.json"):
                content = json.loads(file.read_bytes())
                name = f"{Path(content['model_name']).name} {' '.join(content['results'])}"
                found[f"results {name}"].add(sha256(json.dumps(content["results"]).encode()))
                for samples in file.parent.glob(f"samples_*{file.stem.removeprefix('results_')}.jsonl"):
                    found[f"{samples.name.partition('_20')[0]} {name}"].add(sha256(samples.read_bytes()))
        return {name: " ".join(sorted(values)) for name, values in found.items()}

    return left


def demonstrated(work: Path) -> dict[str, str]:
    """Compares scores and the figures of pages; the other files contain times and speeds."""
    found = {
        str(file.relative_to(work)): sha256(file.read_bytes())
        if file.suffix == ".svg"
        else str(bool(file.stat().st_size))
        for file in files(work / "page")
    }
    return {**scores("results")(work), **found}


def kept(work: Path) -> dict[str, str]:
    """Compares the caches: files of tokens and prompts, and the rows of databases."""
    found = {}
    for file in files(work / "cache"):
        if file.suffix == ".sqlite":
            with contextlib.closing(sqlite3.connect(file)) as database:
                tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
                rows = [sorted(database.execute(f"SELECT * FROM {name}")) for (name,) in tables]
            if rows:
                found[file.name] = sha256(repr(rows).encode())
        elif not file.name.endswith((".lock", "-journal")):
            found[file.name] = sha256(file.read_bytes())
    return found


def text(work: Path) -> None:
    sources = sorted((ROOT / "sbeval" / "training").glob("*.py"))
    (work / "text.txt").write_text("\n".join(file.read_text(encoding="utf-8") for file in sources))


def sweep(work: Path) -> None:
    text(work)
    settings = {
        "checkpoints": [{"pretrained": str(CHECKPOINT), "label": "one"}],
        "runs": [{"name": "t", "tasks": ["sb_text_stream"], "context_lengths": [64, 128], "limit": 4}],
        "metadata": {"data_path": str(work / "text.txt")},
        "output": str(work / "out"),
        "launcher": [sys.executable, str(Path(__file__).with_name("as_sbeval.py"))],
    }
    (work / "sweep.yaml").write_text(yaml.safe_dump(settings))


def arrays(work: Path) -> None:
    from sbeval.corpora.tokenizers import load_tokenizer

    text(work)
    (work / "data").mkdir()
    tokenizer = load_tokenizer(CHECKPOINT)
    tokens = np.array(tokenizer((work / "text.txt").read_text())["input_ids"], np.uint16)
    np.save(work / "data" / "tokens.npy", tokens)
    np.save(work / "data" / "recall.npy", np.empty((0, 65), np.uint16))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (work / "data" / "tokenizer").mkdir(exist_ok=True)
        shutil.copy(CHECKPOINT / name, work / "data" / "tokenizer")
    (work / "data" / "record.json").write_text(json.dumps({"unique_tokens": len(tokens), "tokens_sha256": "0" * 64}))


def recipe(work: Path) -> None:
    arrays(work)
    optimization = {"learning_rate": 0.01, "total_tokens": 1024, "batch_tokens": 128, "warmup_steps": 2}
    settings = {"name": "tiny", "model": TINY, "data": {"folder": str(work / "data"), "recall_share": 0.0}}
    settings |= {"optimization": optimization, "precision": "float32", "log_every_steps": 1, "save_every_steps": 2}
    (work / "tiny.yaml").write_text(yaml.safe_dump(settings))


def parent(work: Path) -> None:
    """A checkpoint trained at 64 tokens, which is a small one beside the demo's."""
    import torch

    from sbeval.models import SbevalConfig, SbevalForCausalLM

    text(work)
    torch.manual_seed(0)
    SbevalForCausalLM(SbevalConfig(**TINY)).save_pretrained(work / "parent")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, work / "parent")


def earlier_report(work: Path) -> None:
    """Results, and an earlier report of them with a user's file in its folder."""
    sys.path[:0] = [str(ROOT / "tests" / "reports")]
    from result_files import CURVES, model_record, perplexity_task, write_run

    from sbeval.reports import build_report

    tasks = [perplexity_task("stream", CURVES["rope"][:2], lengths=[256, 512])]
    write_run(work / "results", model_record("rope"), tasks)
    build_report([work / "results"], work / "out", title="The first")
    (work / "out" / "mine.txt").write_text("mine")


def _evaluation(tasks: str, metadata: dict[str, object], limit: int) -> list[str]:
    options = ["--model_args", f"pretrained={CHECKPOINT},dtype=float32", "--device", "cpu", "--limit", str(limit)]
    return ["run", *options, "--tasks", tasks, "--metadata", json.dumps(metadata)]


def _run(work: Path) -> list[str]:
    metadata = {"data_path": str(work / "text.txt"), "context_lengths": [64, 128]}
    written = ["--output_path", str(work / "out"), "--use_cache", str(work / "answers")]
    return [*_evaluation("sb_text_stream", metadata, 4), *written]


def _caches(work: Path) -> list[str]:
    """A run whose tasks cache tokens, prompts, targets and an evaluator's answers."""
    metadata = {"data_path": str(work / "text.txt"), "context_lengths": [1024], "num_samples": 2}
    metadata["longppl_evaluator"] = str(CHECKPOINT.with_name("rope"))
    return _evaluation("sb_text_stream,sb_text_long,sb_ruler_vt,sb_copy", metadata, 1)


def _inspect(work: Path) -> list[str]:
    return ["inspect", f"{work}/checkpoint", "--tasks", "sb_flipflop", "--metadata", '{"context_lengths": [256]}']


def _extend(work: Path) -> list[str]:
    options = "--context 128 --batch-tokens 256 --steps 3 --warmup-steps 1 --save-every-steps 1 --documents joined"
    options += " --log-every-steps 1 --precision float32 --allow-repeat"
    places = ["--data", str(work / "text.txt"), "--out", str(work / "out")]
    return ["extend", str(work / "parent"), *places, *options.split()]


def _demo(work: Path) -> list[str]:
    return ["demo", "-o", f"{work}/page", "--results", f"{work}/results", "--text", f"{work}/text.txt"]


COMMANDS = {
    command.name: command
    for command in (
        Command("run", _run, text, scores("out")),
        Command("sweep", lambda work: ["sweep", f"{work}/sweep.yaml"], sweep, scores("out")),
        Command("workers", lambda work: ["sweep", f"{work}/sweep.yaml"], sweep, scores("out"), workers=True),
        Command(
            "train", lambda work: ["train", f"{work}/tiny.yaml", "--out", f"{work}/out"], recipe, whole("out/tiny")
        ),
        Command("extend", _extend, parent, whole("out/checkpoint")),
        Command("convert", lambda work: ["convert", str(CHECKPOINT), f"{work}/out"], lambda work: None, whole("out")),
        Command(
            "report",
            lambda work: ["report", f"{work}/results", "-o", f"{work}/out", "--title", "The second"],
            earlier_report,
            whole("out"),
        ),
        Command("demo", _demo, text, demonstrated),
        Command("caches", _caches, text, kept),
        Command(
            "lm_eval", lambda work: ["lm_eval", "--model", "sb", "--log_samples", *_run(work)[1:]], text, scores("out")
        ),
        # this command writes only cache files
        Command(
            "inspect", _inspect, lambda work: shutil.copytree(CHECKPOINT, work / "checkpoint"), whole("checkpoint")
        ),
    )
}
