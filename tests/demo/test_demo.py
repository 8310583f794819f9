"""The demo's evaluation, on checkpoints small enough to build here."""

import json
from pathlib import Path

import pytest
import torch
from corpus_problems import SIZES, byte_level_bpe

from sbeval.demo import evaluation, extension
from sbeval.errors import UserError
from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.reports import build_report
from sbeval.results.intervals import MINIMUM_CLUSTERS
from sbeval.results.records import metric_key


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two untrained models that differ in attention only, with a byte-level tokenizer of few entries."""
    folder, end = tmp_path_factory.mktemp("checkpoints"), "<|endoftext|>"
    tokenizer = byte_level_bpe([], 300, adds_bos=False, bos_token=end, eos_token=end)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "num_hidden_layers": 1, "training_length_tokens": 64}
    for attention in evaluation.CHECKPOINTS:
        torch.manual_seed(0)
        config = SbevalConfig(attention=attention, bos_token_id=0, eos_token_id=0, **sizes)
        SbevalForCausalLM(config).save_pretrained(folder / attention)
        tokenizer.save_pretrained(folder / attention)
    return [folder / attention for attention in evaluation.CHECKPOINTS]


def test_every_checkpoint_is_scored_at_every_length_on_the_same_blocks(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(f"{number} counts as a file of its own.\n" * 40)
    lengths = (64, 128, 256)
    task = evaluation.DemoTask(name="sb_stdlib_fixed_target", context_lengths=lengths, blocks=3)
    run = evaluation.evaluate(tmp_path / "results", checkpoints=checkpoints, tasks=[task], text=text)
    bars = capsys.readouterr().err
    assert "100%" in bars
    assert not [name for name in ("Loading", "Running", "it/s", "token/s") if name in bars]
    scored = []
    for checkpoint in checkpoints:
        (file,) = (run / checkpoint.name).rglob("results_*.json")
        results = json.loads(file.read_text())["results"][task.name]
        for length in lengths:
            assert results[f"{metric_key('tokens', length)},none"] == 3 * 32
            assert results[f"{metric_key('clusters', length)},none"] == 3
        (samples,) = (run / checkpoint.name).rglob("samples_*.jsonl")
        scored.append([json.loads(line)["doc"] for line in samples.read_text().splitlines()])
    assert scored[0] == scored[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("attention", ["stickbreaking", "rope"])
def test_the_shown_command_is_what_lm_eval_understands(attention: str, device: str, tmp_path: Path) -> None:
    from sbeval.harness.options import parse

    checkpoint = tmp_path / "a folder"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"attention": attention}))
    task = evaluation.ON_CPU[0]
    program, run, *arguments = evaluation.command(checkpoint, task, Path("my text.txt"), device)
    chosen = parse(arguments)
    assert (program, run) == ("sbeval", "run")
    longest = {"max_length": task.context_lengths[-1]}  # added by `sbeval run`; perplexity windows do not depend on it
    assert chosen.model_args == evaluation.model_args(checkpoint) | longest
    assert chosen.metadata == {"context_lengths": list(task.context_lengths), "data_path": "my text.txt"}
    assert (chosen.tasks, chosen.limit) == ([task.name], task.blocks)


@pytest.mark.parametrize(("tasks", "multiple"), [(evaluation.ON_CPU, 4), (evaluation.ON_GPU, 64)], ids=["CPU", "GPU"])
def test_lengths_go_from_half_the_trained_to_a_multiple(tasks: tuple[evaluation.DemoTask, ...], multiple: int) -> None:
    lengths = sorted({length for task in tasks for length in task.context_lengths})
    assert lengths[0] * 2 == evaluation.TRAINING_LENGTH_TOKENS
    assert lengths[-1] == evaluation.TRAINING_LENGTH_TOKENS * multiple
    for task in tasks:
        assert task.blocks >= MINIMUM_CLUSTERS
        assert evaluation.TRAINING_LENGTH_TOKENS in task.context_lengths
        assert all(task.context_lengths[-1] % length == 0 for length in task.context_lengths)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors"):
        evaluation.require_checkpoint(tmp_path)


@pytest.mark.exhaustive
def test_stored_results_show_four_models_before_and_after_extension(tmp_path: Path) -> None:
    files = sorted(extension.unpack(tmp_path / "stored").rglob("results_*.json"))
    words = {"title": extension.TITLE, "labels": extension.LABELS}
    page = build_report(files, tmp_path / "page", image_formats=(), **words).read_text()
    for label in extension.LABELS.values():
        assert label in page
    assert "not of this machine" in page
    beyond = {}
    for file in files:
        for task, values in json.loads(file.read_text())["results"].items():
            if task == "sb_stdlib_stream":
                beyond[file.parents[1].name] = values[metric_key("nll", 65536) + ",none"]
    schemes = ("rope_dynamic4", "rope_extended", "stickbreaking", "stickbreaking_extended")
    assert beyond.keys() == {f"scheme_{scheme}" for scheme in schemes}
