"""Registration with lm-eval, from an installed wheel and Python's own start-up."""

import os
import signal
from pathlib import Path

import pytest
from fresh_process import run, run_code
from source_tree import ROOT

from sbeval import plugin
from sbeval.commands import install_plugin
from sbeval.errors import UserError

REGISTRY = "import lm_eval.models\nfrom lm_eval.api.registry import model_registry\n"


def test_the_name_is_registered_without_importing_the_adapter(wheel_python: Path) -> None:
    code = REGISTRY + "import sys\nprint('sb' in model_registry, 'hf' in model_registry, 'torch' in sys.modules)"
    assert run_code(code, python=wheel_python) == ["True True False"]


@pytest.mark.parametrize("value", ["1", "yes"])
def test_it_can_be_switched_off(wheel_python: Path, value: str) -> None:
    code = REGISTRY + "import sys\nprint('sb' in model_registry, 'sbeval' in sys.modules)"
    assert run_code(code, python=wheel_python, environment={"SBEVAL_NO_AUTOLOAD": value}) == ["False False"]


def test_a_name_that_lm_eval_knows_is_left_alone(wheel_python: Path) -> None:
    code = (
        "from lm_eval.api.registry import model_registry\n"
        "model_registry.register('sb', target='somebody.else:Model')\n"
        "import lm_eval.models\n"
        "print(*(target for name, target in model_registry.items() if name == 'sb'))"
    )
    assert run_code(code, python=wheel_python) == ["somebody.else:Model"]


def test_starting_python_imports_nothing_of_sbeval(wheel_python: Path) -> None:
    assert run_code("import sys\nprint([name for name in sys.modules if 'sbeval' in name])", python=wheel_python) == [
        "[]"
    ]


def test_installing_the_line_where_it_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sbeval run"):
        install_plugin.install(tmp_path / "missing")


def test_packaged_tasks_are_found_without_a_path(wheel_python: Path, tmp_path: Path) -> None:
    (packaged,) = wheel_python.parents[1].glob("lib/python*/site-packages/sbeval/tasks")
    checkout = ROOT / "tasks"
    code = (
        "from lm_eval.tasks._index import TaskIndex\n"
        "TaskIndex.build = staticmethod(lambda paths: print(*paths[1:]) or {})\n"
        "from lm_eval.tasks import TaskManager\n"
        f"TaskManager()\nTaskManager(include_path={str(tmp_path)!r})\nTaskManager(include_path=[{str(checkout)!r}])\n"
        f"TaskManager(None, {str(tmp_path)!r}, include_defaults=False)"
    )
    assert run_code(code, python=wheel_python) == [str(packaged), f"{packaged} {tmp_path}", str(checkout), ""]


def test_a_folder_that_holds_the_packaged_files_replaces_them(tmp_path: Path) -> None:
    packaged = plugin.tasks_folder()
    assert plugin.with_packaged_tasks(None) == [packaged]
    assert plugin.with_packaged_tasks(tmp_path) == [packaged, tmp_path]
    relative = os.path.relpath(packaged)
    assert plugin.with_packaged_tasks([tmp_path, relative]) == [tmp_path, relative]


def test_importing_the_package_makes_the_auto_classes_load_the_family(wheel_python: Path) -> None:
    checkpoint = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"
    code = (
        "import sys, sbeval\nprint('torch' in sys.modules, 'transformers' in sys.modules)\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\nprint('sbeval.models' in sys.modules)\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})).__name__)"
    )
    lines = run_code(code, python=wheel_python, environment={"SBEVAL_NO_AUTOLOAD": "1"})
    assert lines == ["False False", "False", "SbevalForCausalLM"]


def test_a_model_type_that_nobody_knows_is_refused_as_before(wheel_python: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_nobody"}')
    code = f"import sbeval\nfrom transformers import AutoConfig\nAutoConfig.from_pretrained({str(tmp_path)!r})"
    process = run([wheel_python, "-c", code])
    assert "`of_nobody`" in process.stderr


def test_importing_the_package_leaves_the_hook_for_errors_alone(wheel_python: Path) -> None:
    code = "import sys\nbefore = sys.excepthook\nimport sbeval\nprint(sys.excepthook is before)"
    assert run_code(code, python=wheel_python) == ["True"]


def test_hf_is_refused_what_only_sb_answers_before_it_loads(wheel_python: Path, tmp_path: Path) -> None:
    # without lm-eval's own tasks, which take ten seconds to read
    code = (
        "import lm_eval.tasks\nfrom sbeval.plugin import tasks_folder\n"
        "manager = lm_eval.tasks.TaskManager(include_path=str(tasks_folder()), include_defaults=False)\n"
        f"lm_eval.simple_evaluate('hf', {f'pretrained={tmp_path}'!r}, tasks=['sb_span'], task_manager=manager)"
    )
    process = run([wheel_python, "-c", code])
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("Expected the model sb for sb_span")


@pytest.mark.parametrize(
    ("raised", "stderr"),
    [("sbeval.UserError('expected x, found y: do z')", "expected x, found y: do z\n"), ("ValueError('other')", None)],
)
def test_only_a_user_error_is_printed_as_its_sentence(wheel_python: Path, raised: str, stderr: str | None) -> None:
    process = run([wheel_python, "-c", f"import lm_eval, sbeval\nraise {raised}"])
    assert process.returncode == 1
    if stderr is None:
        assert "Traceback" in process.stderr
    else:
        assert process.stderr == stderr


@pytest.mark.parametrize(("model", "said"), [("sb", "Ended by SIGINT"), ("hf", "Traceback")])
def test_ctrl_c_is_one_line_where_the_model_is_ours(wheel_python: Path, model: str, said: str) -> None:
    process = run([wheel_python, "-c", "import lm_eval\nraise KeyboardInterrupt", "--model", model])
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert process.stderr.startswith(said)
    assert len(process.stderr.splitlines()) == 1 or model == "hf"


def test_a_previous_hook_still_sees_other_errors(wheel_python: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda *what: print('seen', what[1])"
    code = f"{hook}\nimport lm_eval\nraise ValueError('other')"
    assert run([wheel_python, "-c", code]).stdout == "seen other\n"


def test_lm_eval_knows_sb_and_prints_one_sentence_for_a_missing_checkpoint(wheel_python: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    command = f"--model sb --model_args pretrained={missing} --tasks sb_stdlib_stream"
    process = run([wheel_python.with_name("lm_eval"), *command.split()])
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert str(missing) in process.stderr.splitlines()[-1]
