"""Settings of tasks from `SBEVAL_METADATA` and from a task's own YAML are used and named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run
from lm_eval.tasks import TaskManager
from ruler_problems import byte_level_bpe
from source_tree import ROOT

import sbeval.tasks
from sbeval.errors import UserError
from sbeval.fingerprint.evaluation import run_inputs
from sbeval.harness.options import run_options
from sbeval.results.records import recorded_command
from sbeval.task_metadata import environment_settings, with_environment
from sbeval.tasks.sources import settled_metadata
from sbeval.variables import METADATA_VARIABLE

SETTINGS = {"context_lengths": [300, 500], "sb_flipflop": {"num_samples": 3}}
PACKAGED = Path(*sbeval.tasks.__path__)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    made = byte_level_bpe(["One of the special magic numbers for dry-land is: 7654321."], 300, adds_bos=False)
    made.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def load(task: str, metadata: dict[str, Any] | None = None, *folders: Path) -> Any:
    """Loads a task as a program does that runs lm-eval."""
    manager = TaskManager(include_path=[str(PACKAGED), *map(str, folders)], include_defaults=False, metadata=metadata)
    return manager.load([task])["tasks"][task]


@pytest.mark.parametrize("form", ["text", "json", "yaml"])
def test_text_and_files_say_the_same(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = text = json.dumps(SETTINGS)
    if form != "text":
        (tmp_path / f"settings.{form}").write_text(text)
        value = str(tmp_path / f"settings.{form}")
    monkeypatch.setenv(METADATA_VARIABLE, value)
    settings, file = environment_settings()
    assert settings == SETTINGS
    assert (file is None) == (form == "text")
    for blank in ("", "  "):
        monkeypatch.setenv(METADATA_VARIABLE, blank)
        assert environment_settings().settings == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no-such-file", "neither a JSON object nor a file: correct it"),
        ("[1, 2]", "neither a JSON object nor a file"),
        ('{"context_lengths": [1,}', "it is not JSON: .*: write a JSON object."),
        ("LIST.json", "as a JSON object"),
        ("KEYS.yaml", "some key is no text"),
        ("BROKEN.yaml", "not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LIST.json").write_text("[1]")
    (tmp_path / "KEYS.yaml").write_text("sb_flipflop: {1: 2}\n")
    (tmp_path / "BROKEN.yaml").write_text("a: [1\n")
    monkeypatch.setenv(METADATA_VARIABLE, value)
    with pytest.raises(UserError, match=message) as raised:
        with_environment({})
    assert "\n" not in str(raised.value)


def test_settings_are_merged_and_two_values_of_one_setting_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, json.dumps({**SETTINGS, "label": None}))
    ours = {"label": "mine", "context_lengths": (300, 500), "sb_flipflop": {"ignore_share": 0.5}}
    assert with_environment(ours) == {
        "label": "mine",
        "context_lengths": [300, 500],
        "sb_flipflop": {"ignore_share": 0.5, "num_samples": 3},
    }
    with pytest.raises(UserError, match=r"^SBEVAL_METADATA sets context_lengths to \[300, 500\], and --metadata or "):
        with_environment({"context_lengths": [512]})
    with pytest.raises(UserError, match=r"sets num_samples of sb_flipflop to 3, and .* sets it to 4: remove one"):
        with_environment({"sb_flipflop": {"num_samples": 4}})
    with pytest.raises(UserError, match="sets context_lengths"):
        run_options({"tasks": ["sb_flipflop"], "metadata": "context_lengths=512"})
    with pytest.raises(UserError, match="sets context_lengths"):
        run_inputs({"tasks": ["sb_flipflop"], "metadata": {"context_lengths": [512]}})


def test_a_program_that_passes_no_metadata_runs_the_same_settings(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = load("sb_flipflop", {**SETTINGS, "tokenizer": tokenizer})
    assert "Task settings" not in capsys.readouterr().out
    monkeypatch.setenv(METADATA_VARIABLE, json.dumps({**SETTINGS, "tokenizer": tokenizer}))
    monkeypatch.setattr("sbeval.task_metadata._said", set())
    task = load("sb_flipflop")
    assert task.options == passed.options
    assert len(task.dataset["test"]) == 3
    said = "Task settings: context_lengths, sb_flipflop, tokenizer from SBEVAL_METADATA.\n"
    assert capsys.readouterr().out == said
    load("sb_flipflop")
    assert capsys.readouterr().out == ""  # said once
    with pytest.raises(UserError, match=r"the program that runs lm-eval sets it to \[512\]"):
        load("sb_flipflop", {"context_lengths": [512]})
    run = run_options({"tasks": ["sb_flipflop"]})
    assert run.metadata["sb_flipflop"] == {"num_samples": 3}


def test_a_finished_run_is_not_taken_for_one_with_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"tasks": ["sb_flipflop"], "metadata": {"num_samples": 3}}
    plain = run_inputs(config)
    assert plain.settings["metadata.num_samples"] == 3
    monkeypatch.setenv(METADATA_VARIABLE, json.dumps(SETTINGS))
    assert run_inputs(config).settings == {
        **plain.settings,
        "metadata.context_lengths": [300, 500],
        "metadata.sb_flipflop": {"num_samples": 3},
    }


def test_the_recorded_command_repeats_the_run_and_keeps_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, '{"label": "a b", "hf_token": "secret"}')
    assert recorded_command().startswith('SBEVAL_METADATA=\'{"label": "a b", "hf_token": ***}\' ')
    assert "SBEVAL" not in recorded_command(["lm_eval", "run"])


def test_a_yaml_that_includes_a_task_and_sets_one_option_keeps_the_others(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        f"task: my_needles\ninclude: {PACKAGED / 'ruler' / 'yaml' / 'sb_niah_single_1.yaml'}\n"
        "metadata:\n  num_needle_k: 2\n  context_lengths: [1000]\n  num_samples: 4\n"
    )
    (folder / "flips.yaml").write_text(
        "task: my_flips\nclass: !function sbeval.tasks.recall.mqrar.FlipFlopTask\n"
        "metadata: {context_lengths: [300], num_samples: 4}\n"
    )
    task = load("my_needles", {"tokenizer": tokenizer, "num_samples": 2}, folder)
    assert (task.options.num_needle_k, task.options.num_samples, task.lengths) == (2, 2, (1000,))
    assert task.options.type_haystack == "noise"  # as in the file that it includes
    assert capsys.readouterr().out.splitlines() == [
        "my_needles: num_samples is 2 from --metadata, not 4 from mine.yaml.",
        "my_needles: context_lengths, num_needle_k from the metadata of mine.yaml.",
    ]
    monkeypatch.setenv(METADATA_VARIABLE, '{"my_flips": {"num_samples": 3}}')
    task = load("my_flips", {"tokenizer": tokenizer}, folder)
    assert len(task.dataset["test"]) == 3
    assert "my_flips: num_samples is 3 from SBEVAL_METADATA, not 4 from flips.yaml." in capsys.readouterr().out


def test_a_group_that_changes_one_option_of_a_packaged_task_keeps_the_others(tokenizer: str, tmp_path: Path) -> None:
    member = "{task: sb_niah_single_1, metadata: {context_lengths: [1000], num_samples: 1}}"
    (tmp_path / "group.yaml").write_text(f"group: my_group\ntask:\n  - {member}\n")
    manager = TaskManager(
        include_path=[str(PACKAGED), str(tmp_path)], include_defaults=False, metadata={"tokenizer": tokenizer}
    )
    task = manager.load(["my_group"])["tasks"]["sb_niah_single_1"]
    assert (task.lengths, task.options.type_needle_k) == ((1000,), "words")


def test_the_environment_is_read_by_a_task_that_no_hook_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, json.dumps(SETTINGS))
    settled = settled_metadata("sb_flipflop", {"seed": 1}, ("context_lengths",))
    assert settled == {"seed": 1, **SETTINGS}


def test_the_first_line_of_a_run_says_where_its_settings_come_from(tmp_path: Path) -> None:
    (tmp_path / "cache_rank0.db").write_text("no database")
    settings = tmp_path / "settings.yaml"
    settings.write_text("context_lengths: [256]\n")
    checkpoint = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"
    command = [Path(sys.executable).with_name("sbeval"), "run", "--model_args", f"pretrained={checkpoint}"]
    command += ["--tasks", "sb_flipflop", "--metadata", "num_samples=2", "--use_cache", str(tmp_path / "cache")]
    process = run(command, environment={METADATA_VARIABLE: str(settings)})
    assert process.returncode == 1
    first, *_ = process.stdout.splitlines()
    assert first == (
        f"Task settings: context_lengths from SBEVAL_METADATA (the file {settings}); num_samples from --metadata."
    )
