"""The `sbeval` command: what it passes on, what it prints, and how it fails."""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from fresh_process import run, run_code
from source_tree import ROOT

from sbeval.errors import UserError
from sbeval.harness.options import parse
from sbeval.registered import tasks_folder
from sbeval.settings import described
from sbeval.tasks import metadata as task_metadata
from sbeval.tasks import user_options as task_user_options
from sbeval.tasks.graded import options as graded_options
from sbeval.tasks.metadata import TaskOptions
from sbeval.tasks.mrcr import task as mrcr
from sbeval.tasks.perplexity import options as perplexity_options
from sbeval.tasks.recall import options as recall_options
from sbeval.tasks.recall import tallies
from sbeval.tasks.ruler import options as ruler_options

OPTION_MODULES = (task_metadata, perplexity_options, recall_options, ruler_options, graded_options, tallies, mrcr)

CHECKPOINT = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"
SBEVAL = Path(sys.executable).with_name("sbeval")


def helped(*command: str) -> tuple[list[str], set[str]]:
    """The lines of a command's help, and which heavy packages were imported for it."""
    code = f"import sys\nfrom sbeval.__main__ import main\nsys.argv[1:] = {[*command, '--help']}\ntry:\n    main()\n"
    heavy = {"torch", "transformers", "lm_eval"}
    *lines, imported = run_code(f"{code}finally:\n    print(*{heavy} & set(sys.modules))")
    return lines, set(imported.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], ("run", "report", "demo", "train", "extend", "convert")),
        *(([name], (f"usage: sbeval {name}",)) for name in ("train", "extend")),
        (["inspect"], ("--memory",)),
    ],
    ids=str,
)
def test_help_names_what_there_is_without_importing_torch(command: list[str], words: tuple[str, ...]) -> None:
    lines, imported = helped(*command)
    assert all(any(word in line for line in lines) for word in words)
    assert not imported


def test_a_shell_completes_commands_and_options() -> None:
    asked = {"_SBEVAL_COMPLETE": "complete_bash", "COMP_WORDS": "sbeval rep", "COMP_CWORD": "1"}
    assert run([SBEVAL], environment=asked).stdout.split() == ["report"]
    asked |= {"COMP_WORDS": "sbeval report --hub-", "COMP_CWORD": "2"}
    assert run([SBEVAL], environment=asked).stdout.split() == ["--hub-results", "--hub-dataset"]


@pytest.mark.parametrize("command", [[SBEVAL], [sys.executable, "-m", "sbeval"]], ids=["script", "module"])
def test_tasks_prints_the_folder_for_include_path_and_the_version_is_the_package_s(command: list[str | Path]) -> None:
    assert run([*command, "tasks"]).stdout == f"{tasks_folder()}\n"
    assert run([*command, "--version"]).stdout == f"sbeval {importlib.metadata.version('sbeval')}\n"


@pytest.mark.exhaustive
def test_help_of_run_is_ours_and_holds_every_setting_without_torch() -> None:
    from sbeval.model_adapters.options import AdapterOptions
    from sbeval.tasks.user_options import metadata_keys

    lines, imported = helped("run")
    assert not imported & {"torch", "transformers"}
    assert lines[0].startswith("usage: sbeval run")
    text = " ".join(" ".join(lines).split())
    assert "--include_path" in text
    assert "(default: sb, which loads every model that hf loads)" in text
    assert "lm-eval run" not in text
    assert "(default: hf)" not in text
    metadata = [line for _, keys in metadata_keys() for line in keys]
    for name, meaning in [*described(AdapterOptions), *metadata]:
        assert f"{name} {meaning}" in text
    shown = {name for name, _ in metadata}
    assert {"context_lengths", "data_path", "split", "num_samples", "depths", "n_back", "distances"} <= shown
    assert run([SBEVAL, "run"]).stdout == run([SBEVAL, "run", "--tasks", "tiny", "-h"]).stdout


def test_help_of_metadata_knows_the_options_of_every_packaged_task() -> None:
    options = [getattr(module, name) for module in OPTION_MODULES for name in dir(module)]
    kinds = {kind for kind in options if isinstance(kind, type) and issubclass(kind, TaskOptions)}
    assert kinds == set(task_user_options.options_classes())
    assert {kind for kind in kinds if "title" not in vars(kind)} == {
        ruler_options.QaOptions,
        graded_options.GradedOptions,
    }


def test_an_unknown_option_of_run_is_refused() -> None:
    process = run([SBEVAL, "run", "--tasks", "tiny", "--no_such_option"])
    assert process.returncode == 1
    assert process.stderr.startswith("Expected options of `sbeval run`, found: unrecognized arguments: --no_such")


@pytest.mark.parametrize(
    ("arguments", "model", "log_samples", "batch_size"),
    [
        (["--tasks", "tiny"], "sb", False, "auto"),
        (["--tasks", "tiny", "--output_path", "out", "-b", "1"], "sb", True, "1"),
        (["--tasks", "tiny", "-oout", "--batch_size", "3"], "sb", True, "3"),
        (["--model", "hf", "--tasks", "tiny"], "hf", False, None),
        (["--config", "run.yaml", "--tasks", "tiny"], "hf", True, None),
    ],
    ids=["plain", "with output", "short option", "another model", "a configuration file"],
)
def test_only_what_is_missing_is_added(
    arguments: list[str],
    model: str,
    log_samples: bool,
    batch_size: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: hf\noutput_path: out\n")
    chosen = vars(parse(arguments))
    assert (chosen["model"], chosen.get("log_samples", False)) == (model, log_samples)
    assert (chosen.get("batch_size"), chosen["tasks"]) == (batch_size, ["tiny"])


@pytest.mark.parametrize(
    ("options", "max_length"),
    [
        (["--metadata", '{"context_lengths": [1024, 4096]}'], 4096),
        (["--metadata", "context_lengths=2048"], 2048),
        (["--metadata", '{"context_lengths": [1024], "sb_ruler_cwe": {"context_lengths": [3000]}}'], 3000),
        (["--metadata", '{"context_lengths": [256]}'], None),
        ([], None),
        (["--model", "hf", "--metadata", '{"context_lengths": [4096]}'], None),
    ],
    ids=["two lengths", "one length", "one task's own", "within the model's own", "none asked for", "another model"],
)
def test_the_longest_length_becomes_max_length(options: list[str], max_length: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    common = ["--tasks", "tiny", "--model_args", f"pretrained={tmp_path}", *options]
    found = parse(common).model_args
    assert (found["pretrained"], found.get("max_length")) == (str(tmp_path), max_length)
    assert parse([*common[:3], f"{common[3]},max_length=99", *options]).model_args["max_length"] == 99


@pytest.mark.parametrize("key", ["1", "true"])
def test_a_key_of_a_configuration_that_no_results_file_can_hold_is_refused_first(key: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"tasks: [sb_stdlib_stream]\nmetadata: {{{key}: 3}}\n")
    with pytest.raises(UserError, match="text"):
        parse(["--config", str(config)])


@pytest.mark.exhaustive
def test_lm_evals_own_tasks_are_left_unread_where_none_is_asked_for(tmp_path: Path) -> None:
    code = (
        "from lm_eval.tasks._index import TaskIndex\nimport sys\nfrom sbeval.__main__ import main\n"
        "def build(paths, **options):\n    sys.exit(f'{len(list(paths))} folders')\n"
        "TaskIndex.build = staticmethod(build)\n"
        f"sys.argv[1:] = ['run', '--model_args', 'pretrained={CHECKPOINT}', '--tasks', sys.argv[1]]\nmain()"
    )
    environment = {"HF_HOME": str(tmp_path)}
    for task, folders in (("sb_stdlib_stream", 1), ("sb_paper_nlp", 2)):
        process = run([sys.executable, "-c", code, task], environment=environment)
        assert process.stderr.splitlines()[-1] == f"{folders} folders"
