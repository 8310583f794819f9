"""A sweep file: what it becomes, which keys it may have, and what is said about the others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sbeval.errors import UserError
from sbeval.sweep.command import load_sweep, sweep_from_command
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun, plan
from sbeval.sweep.suites import SUITES, UNCUT, suite_runs

RUN = {"name": "stream", "tasks": ["sb_stdlib_stream"]}
APART = {"name": "r", "tasks": ["t"], "lengths_apart": True, "context_lengths": [64, 128]}


def write(folder: Path, settings: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings), encoding="utf-8")
    return path


def test_every_checkpoint_goes_through_every_run_in_its_own_way(tmp_path: Path) -> None:
    written = {
        "output": str(tmp_path / "out"),
        "checkpoints": [
            "models/sb",
            {"pretrained": "models/rope", "model_args": {"dtype": "float32"}},
            {"pretrained": "models/rope", "label": "rope dynamic", "model_args": {"rope_scaling": "dynamic:4"}},
        ],
        "runs": [
            {**RUN, "context_lengths": [4096, 1024], "limit": 3, "model_args": {"max_length": 4096}},
            {"name": "mmlu", "tasks": "mmlu", "num_fewshot": 0},
        ],
        **{"model_args": {"dtype": "bfloat16"}, "metadata": {"seed": 7}, "limit": 10},
    }
    runs = plan(load_sweep(write(tmp_path, written)))
    labels = ("sb", "rope", "rope_dynamic")
    assert [str(run) for run in runs] == [f"{label}/{name}" for label in labels for name in ("stream", "mmlu")]
    assert runs[2].config == {
        "model": "sb",
        "model_args": {"pretrained": "models/rope", "dtype": "float32", "max_length": 4096},
        "tasks": ["sb_stdlib_stream"],
        "metadata": {"seed": 7, "context_lengths": [1024, 4096]},
        "limit": 3,
        "output_path": str(tmp_path / "out" / "rope" / "stream"),
        "log_samples": True,
    }
    own = {"dtype": "bfloat16", "rope_scaling": "dynamic:4"}
    assert runs[5].config["model_args"] == {"pretrained": "models/rope", **own}
    assert (runs[5].config["num_fewshot"], runs[5].config["limit"]) == (0, 10)
    assert runs[5].config["metadata"] == {"seed": 7, "label": "rope dynamic"}


def test_lengths_apart_are_runs_of_their_own() -> None:
    run = SweepRun(name="roll", tasks=("t",), context_lengths=(512, 65536), lengths_apart=True)
    runs = plan(Sweep(checkpoints=(SweepCheckpoint(pretrained="a/b"),), runs=(run,)))
    lengths = {run.name: run.config["metadata"]["context_lengths"] for run in runs}
    assert lengths == {"roll-512": [512], "roll-65536": [65536]}


def test_a_file_may_name_a_suite_and_its_lengths(tmp_path: Path) -> None:
    suite = {"suite": "paper-length", "context_lengths": [2048, 4096]}
    settings = load_sweep(write(tmp_path, {**suite, "checkpoints": ["a"], "runs": [RUN]}))
    of_suite = [f"{text}-{protocol}" for text in ("wikitext", "pile") for protocol in ("rolling", "stream")]
    assert [run.name for run in settings.runs] == [*of_suite, "stream"]
    assert [run.context_lengths for run in settings.runs] == [(2048, 4096)] * 4 + [None]
    alone = load_sweep(write(tmp_path, {"context_lengths": [2048], "checkpoints": ["a"], "runs": [RUN]}))
    assert alone.runs[0].context_lengths == (2048,)


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_every_suite_is_a_set_of_runs_with_names_of_their_own(suite: str) -> None:
    runs = suite_runs(suite, None)
    assert len({run.name for run in runs}) == len(runs) > 0


def test_mmlus_shots_are_runs_of_their_own() -> None:
    runs = suite_runs("paper-mmlu", None)
    assert [(run.tasks, run.num_fewshot) for run in runs] == [(("sb_paper_mmlu",), 0), (("sb_paper_mmlu",), 5)]


def test_ruler_leaves_room_for_an_answer_and_babilong_has_a_run_a_length() -> None:
    (ruler,) = suite_runs("paper-ruler", (4096, 16384))
    assert ruler.model_args["max_length"] > 16384
    babilong = [run for run in suite_runs("long-context", (4096, 131072)) if run.name.startswith("babilong")]
    assert [run.metadata["max_seq_lengths"] for run in babilong] == ["4k", "128k"]
    assert all(run.model_args["max_length"] > length for run, length in zip(babilong, (4096, 131072), strict=True))


def test_texts_whose_answer_a_cut_would_take_away_are_run_whole_where_lengths_reach_them() -> None:
    uncut = {name: tokens for name, _, tokens, _ in UNCUT}
    for lengths, expected in (
        (None, {"graphwalks-128k", "graphwalks-1m", "infinitebench"}),
        ((4096, 65536), set()),
        ((4096, 131072), {"graphwalks-128k", "infinitebench"}),
        ((2**20,), {"graphwalks-128k", "graphwalks-1m", "infinitebench"}),
    ):
        runs = {run.name: run for run in suite_runs("long-context", lengths) if run.name in uncut}
        assert set(runs) == expected
        for name, run in runs.items():
            assert run.model_args["truncation"] == "error"
            assert run.model_args["max_length"] > uncut[name]


def test_longbench_is_cut_to_the_lengths_asked_for() -> None:
    runs = {run.name: run for run in suite_runs("long-context", (4096, 16384))}
    for name, task in (("longbench", "longbench"), ("longbench2", "longbench2")):
        for length in (4096, 16384):
            assert runs[f"{name}-{length}"].tasks == (task,)
            assert runs[f"{name}-{length}"].model_args == {"max_length": length}
    whole = {run.name: run for run in suite_runs("long-context", None)}
    assert whole["longbench"].model_args == whole["longbench2"].model_args == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"checkpoints": [{"pretrained": "a", "lable": "b"}]}, "did you mean 'label'"),
        ({"runs": [{**RUN, "lenghts_apart": True}]}, "did you mean 'lengths_apart'"),
        ({"checkpoints": []}, "at least one"),
        ({"checkpoints": None}, "at least one"),
        ({"checkpoints": "a"}, "as a list"),
        ({"checkpoints": [3]}, "mapping"),
        ({"checkpoints": ["x/a", "y/a"]}, "label"),
        ({"checkpoints": [{"label": "b"}]}, "Expected pretrained of a checkpoint, found none: add it in sweep.yaml"),
        ({"checkpoints": [{"pretrained": "a", "model_args": {"pretrained": "b"}}]}, "pretrained"),
        ({"checkpoints": [{"pretrained": "a", "model_args": "dtype"}]}, "model_args of checkpoint 'a' to be a mapping"),
        ({"runs": [RUN, RUN]}, "own name"),
        ({"runs": [APART, {"name": "r-64", "tasks": ["t"]}]}, "found r-64 more than once"),
        ({"runs": None}, "suite nor runs"),
        ({"runs": [{"name": "x", "tasks": []}]}, "tasks of run 'x'"),
        ({"runs": [{**RUN, "context_lengths": [0]}]}, "positive whole numbers"),
        ({"runs": [{**RUN, "lengths_apart": True}]}, "context_lengths"),
        ({"runs": [{**RUN, "num_fewshot": -1}]}, "num_fewshot"),
        ({"runs": [{**RUN, "limit": 0}]}, "limit of run 'stream'"),
        ({"limit": "many"}, "limit of the sweep"),
        ({"suite": "paper"}, "paper-length"),
        ({"suite": "paper-nlp", "context_lengths": [4096]}, "paper-nlp has fixed prompt lengths"),
        ({"suite": "long-context", "context_lengths": [5000]}, "1024"),
        ({"launcher": []}, "launcher"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_sweep(write(tmp_path, {"checkpoints": ["a"], "runs": [RUN]} | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["checkpoints: [a", "just text", ""], ids=["no YAML", "no mapping", "empty"])
def test_a_file_that_holds_no_settings(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"sweep\.yaml"):
        load_sweep(write(tmp_path, text))
    with pytest.raises(UserError, match="nowhere"):
        load_sweep(tmp_path / "nowhere.yaml")


def test_the_command_line_takes_a_file_or_a_suite_over_checkpoints(tmp_path: Path) -> None:
    chosen = sweep_from_command(
        ["m/a", "m/b"],
        suite="paper-length",
        context_lengths="2048, 4096",
        limit=2.0,
        model_args='{"rope_scaling": {"rope_type": "dynamic", "factor": 1}}',
    )
    assert [checkpoint.folder_name for checkpoint in chosen.checkpoints] == ["a", "b"]
    assert (chosen.output, repr(chosen.limit)) == ("results/paper-length", "2")
    assert chosen.model_args == {"rope_scaling": {"rope_type": "dynamic", "factor": 1}}
    assert sweep_from_command(["a"], suite="paper-nlp", model_args="dtype=float32").model_args == {"dtype": "float32"}
    assert sweep_from_command(["a"], suite="paper-ruler", metadata='{"essays": "E"}').metadata == {"essays": "E"}
    path = write(tmp_path, {"checkpoints": ["a"], "runs": [RUN]})
    assert sweep_from_command([str(path)], suite=None) == load_sweep(path)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "paper-mmlu"),
        (["ckpt"], {}, "found ckpt"),
        (["a.yaml", "b.yaml"], {}, "one sweep file"),
        (["a.yaml"], {"limit": 2.0}, "--limit with --suite only"),
        ([], {"suite": "paper-nlp"}, "checkpoints"),
        (["a"], {"suite": "paper-length", "context_lengths": "4k"}, "4k"),
        (["a"], {"suite": "paper-length", "model_args": "dtype"}, "dtype"),
    ],
)
def test_arguments_that_do_not_belong_together(arguments: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep_from_command(arguments, **{"suite": None, **options})
