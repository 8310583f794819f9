"""Training in two processes on CPUs, with or without FSDP, equals training in one process."""

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import pytest
from ranks import run_ranks
from training_problems import (
    assert_same_weights,
    json_lines,
    losses,
    parts_of,
    save_parent,
    save_tiny_llama,
    tiny_extension,
)  # fmt: skip

from sbeval.errors import UserError
from sbeval.training.command import extend_command
from sbeval.training.extend import extend

RUN = ["--context", "128", "--micro-batch-tokens", "128", "--warmup-steps", "1", "--learning-rate", "3e-3"]
RUN += ["--precision", "float32", "--log-every-steps", "1"]


@pytest.mark.exhaustive
def test_sharded_weights_learn_the_same_stop_and_resume_and_leave_the_same_checkpoint(tmp_path, data_folder):
    parent = save_parent(tmp_path / "parent_rope", data_folder, "rope", tie_word_embeddings=True)
    options = [str(parent), "--data", str(data_folder), *RUN, "--rope-scaling", "dynamic:4"]
    options += ["--steps", "12", "--batch-tokens", "512"]
    extend_command([*options, "--out", str(tmp_path / "one")])
    options += ["--out", str(tmp_path / "two"), "--fsdp", "--gradient-checkpointing"]
    run_processes("extend", [*options, "--max-seconds", "0"], options, sharded=True)
    one, two = (tmp_path / name / "checkpoint" for name in ("one", "two"))
    assert parts_of(tmp_path / "two") == [(0, 10), (10, 12)]
    assert [part["processes"] for part in json_lines(tmp_path / "two" / "runs.jsonl")] == [2, 2]
    assert (tmp_path / "two" / "states" / "checkpoint-12" / "pytorch_model_fsdp.bin").is_file()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert_same_weights(two, one, rtol=2e-2, atol=2e-4)
    assert (two / "config.json").read_text() == (one / "config.json").read_text()


@pytest.mark.exhaustive
def test_processes_whose_documents_fill_different_numbers_of_batches_wait_for_each_other(tmp_path, data_folder):
    save_tiny_llama(tmp_path / "llama", data_folder)
    draw = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for index in range(120):
        letters = draw.choice(list("abcdef"), int(draw.choice([5, 30, 90, 400])))
        (tmp_path / "texts" / f"{index:03d}.txt").write_text("".join(letters))
    options = [str(tmp_path / "llama"), "--data", str(tmp_path / "texts"), *RUN, "--steps", "4"]
    options += ["--context", "256", "--batch-tokens", "1024", "--micro-batch-tokens", "256"]
    extend_command([*options, "--out", str(tmp_path / "one")])
    run_processes("extend", [*options, "--out", str(tmp_path / "two")])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


@pytest.mark.exhaustive
def test_processes_that_share_windows_learn_the_same(tmp_path, data_folder):
    parent = save_parent(tmp_path / "parent", data_folder)
    options = [str(parent), "--data", str(data_folder), "--documents", "joined", *RUN]
    options += ["--steps", "4", "--batch-tokens", "512"]
    extend_command([*options, "--out", str(tmp_path / "one")])
    shared = [*options, "--out", str(tmp_path / "four"), "--context-parallel", "2", "--gradient-checkpointing"]
    run_processes("extend", shared, processes=4)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    one, four = (tmp_path / name / "checkpoint" for name in ("one", "four"))
    assert_same_weights(four, one, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "degree", "processes", "message"),
    [
        ({}, 2, 1, "multiple of 2 ranks for --context-parallel 2, found 1"),
        ({"documents": "joined"}, 3, 3, "--context to be a multiple of 6"),
        ({"documents": "separate"}, 2, 2, "--documents joined"),
    ],
)
def test_windows_that_cannot_be_shared_are_refused_before_anything_is_written(
    tmp_path, data_folder, monkeypatch, changes, degree, processes, message
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with pytest.raises(UserError, match=message):
        extend(tiny_extension(tmp_path, data_folder, **changes), tmp_path / "out", context_parallel=degree)
    assert not (tmp_path / "out").exists()


def run_processes(module: str, *commands: Sequence[str], sharded: bool = False, processes: int = 2) -> None:
    """Runs commands of a module of `sbeval.training`, one after the other, in several processes on CPUs."""
    run_ranks(_run, module, sharded, commands, processes=processes)


def _run(rank: int, module: str, sharded: bool, commands: Sequence[Sequence[str]]) -> None:
    if sharded:
        _shard_on_cpus()
    main = getattr(import_module("sbeval.training.command"), f"{module}_command")
    for command in commands:
        main(list(command))


def _shard_on_cpus() -> None:
    from accelerate import state
    from accelerate.utils import DistributedType

    plain = state.PartialState.__init__

    def with_accelerators(self: state.PartialState, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    state.PartialState.__init__ = with_accelerators
