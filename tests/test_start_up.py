"""The start-up line that registers the model with lm-eval breaks no interpreter, whatever has become of sbeval."""

import ast
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import run, run_code
from source_tree import ROOT

from sbeval import registered
from sbeval.commands import install_plugin
from sbeval.errors import UserError

LINE = (ROOT / "sbeval_autoload.pth").read_text(encoding="utf-8")
OLDEST = (3, 6)


@functools.cache
def interpreters() -> dict[str, str]:
    """This interpreter, and the oldest and the newest of those that lie beside it or on the path."""
    named = [shutil.which(f"python3.{minor}") for minor in range(OLDEST[1], 16)]
    beside = [str(path) for path in Path(sys.base_prefix).parent.glob("*/bin/python3")]
    found = {}
    for python in [*filter(None, named), *beside]:
        code = "import sys; print(*sys.version_info[:2])"
        asked = subprocess.run([python, "-SEc", code], capture_output=True, text=True)
        if asked.returncode == 0 and (version := tuple(map(int, asked.stdout.split()))) >= OLDEST:
            found[version] = python
    versions = sorted(found)
    return {"this": sys.executable, "oldest": found[versions[0]], "newest": found[versions[-1]]}


@pytest.fixture(params=["this", "oldest", "newest"])
def python(request: pytest.FixtureRequest) -> str:
    return interpreters()[request.param]


def start(site: Path, code: str, *, python: str = sys.executable) -> tuple[str, str]:
    """Starts Python with `site` as its only site folder, and returns what it printed to stdout and stderr."""
    start_up = f"import site\nsite.addsitedir({str(site)!r})\n"
    process = subprocess.run([python, "-SEc", start_up + code], capture_output=True, text=True, cwd=site, timeout=600)
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


@pytest.fixture
def site(tmp_path) -> Path:
    """A site folder with the line and an lm-eval of its own."""
    (tmp_path / "sbeval_autoload.pth").write_text(LINE)
    (tmp_path / "lm_eval" / "tasks").mkdir(parents=True)
    for name in ("__init__", "models", "tasks/__init__", "tasks/manager"):
        (tmp_path / "lm_eval" / f"{name}.py").touch()
    return tmp_path


def package(site: Path, **sources: str) -> None:
    (site / "sbeval").mkdir()
    for name, source in sources.items():
        (site / "sbeval" / f"{name}.py").write_text(source)


IMPORTS = "import lm_eval, lm_eval.models, lm_eval.tasks.manager\nprint('went on')"
PLUGIN = (ROOT / "sbeval" / "plugin.py").read_text(encoding="utf-8")
ERRORS = (ROOT / "sbeval" / "errors.py").read_text(encoding="utf-8")
REGISTERED = (ROOT / "sbeval" / "registered.py").read_text(encoding="utf-8")
VARIABLES = (ROOT / "sbeval" / "variables.py").read_text(encoding="utf-8")
WHOLE = {"__init__": "", "plugin": PLUGIN, "errors": ERRORS, "registered": REGISTERED, "variables": VARIABLES}
BROKEN = {
    "a syntax error": ({"__init__": "def (", "plugin": PLUGIN}, "SyntaxError"),
    "a syntax error in the plugin": ({"__init__": "", "plugin": "x = = 1"}, "SyntaxError"),
    "a file is missing": ({"__init__": "", "plugin": PLUGIN}, "No module named 'sbeval.errors'"),
    "names are missing": ({"__init__": "", "plugin": PLUGIN, "errors": ERRORS}, "No module named 'sbeval.registered'"),
    "an error while it is imported": ({"__init__": "1 / 0"}, "ZeroDivisionError"),
    "an exit while it is imported": ({"__init__": "raise SystemExit(3)"}, "SystemExit"),
    "null bytes": ({"__init__": "\0"}, "null bytes"),
    "a plugin of another version": ({"__init__": "", "plugin": ""}, "install"),
    "an lm-eval of another version": (WHOLE, "since sbeval cannot patch"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_package_stops_nobody_and_is_said_in_one_line(what, site):
    sources, said = BROKEN[what]
    package(site, **sources)
    out, err = start(site, IMPORTS)
    assert out == "went on\n"
    lines = err.splitlines()
    assert all(line.startswith("lm_eval goes on without the model sb") for line in lines)
    assert len(lines) == (2 if "lm-eval" in what else 1)  # a line for each module that it would have completed
    assert said in lines[0]
    assert start(site, "print('nothing of lm-eval')") == ("nothing of lm-eval\n", "")


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a folder of caches", "the package without the plugin"])
def test_a_line_left_by_an_uninstalled_package_does_nothing_quietly(left, python, site):
    if left == "the package without the plugin":
        package(site, __init__="")
    elif left != "nothing":
        package(site)
    if left == "a folder of caches":
        (site / "sbeval" / "__pycache__").mkdir()
    assert start(site, IMPORTS, python=python) == ("went on\n", "")


def test_a_python_that_the_package_was_not_written_for_goes_on(python, site):
    package(site, __init__="match 1:\n    case 1 if (type X = int): pass")
    out, err = start(site, IMPORTS, python=python)
    assert (out, err.count("\n")) == ("went on\n", 1)
    assert "SyntaxError" in err


def test_the_real_package_stops_no_python(python, site):
    (site / "sbeval").symlink_to(ROOT / "sbeval")
    out, err = start(site, IMPORTS, python=python)
    assert out == "went on\n"
    assert all(line.startswith("lm_eval goes on without the model sb") for line in err.splitlines())


def test_nobody_listening_on_stderr_is_no_error(site):
    package(site, __init__="def (")
    assert start(site, f"import sys\nsys.stderr = None\n{IMPORTS}") == ("went on\n", "")


NO_LISTENER = {
    "full": "exec 2>/dev/full",
    "closed": "exec 2>&-",
    "a pipe that nobody reads": "exec 2> >(exec 2>&- 0<&-); sleep 0.2",
    "strict ASCII": "true",
}


@pytest.mark.parametrize("said_by", ["the line", "the plugin"])
@pytest.mark.parametrize("state", NO_LISTENER)
def test_a_standard_error_that_takes_no_line_stops_nobody(state, said_by, site):
    if said_by == "the line":
        package(site, __init__="raise ValueError('naïve 東京 \\udc80')")
    else:
        package(site, **WHOLE)
    code = f"import site\nsite.addsitedir({str(site)!r})\n{IMPORTS}"
    if state == "strict ASCII":
        code = f"import sys\nsys.stderr.reconfigure(encoding='ascii', errors='strict')\n{code}"
    begun = ["bash", "-c", f'{NO_LISTENER[state]}; exec "$@"', "bash", sys.executable, "-SEc", code]
    ended = subprocess.run(begun, capture_output=True, text=True, cwd=site, timeout=600)
    assert (ended.stdout, ended.returncode) == ("went on\n", 0), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.exhaustive
def test_an_interrupt_while_the_package_is_imported_ends_python(site):
    package(site, __init__="raise KeyboardInterrupt")
    code = f"import site\nsite.addsitedir({str(site)!r})\n{IMPORTS}"
    ended = subprocess.run([sys.executable, "-SEc", code], capture_output=True, text=True, cwd=site, timeout=600)
    assert ended.stdout == ""
    assert ended.returncode == -signal.SIGINT


@pytest.mark.exhaustive
def test_a_line_cut_off_anywhere_stops_nobody(site):
    folders = []
    for number, length in enumerate(range(0, len(LINE), 13)):
        folder = site / str(number)
        folder.mkdir()
        (folder / "sbeval_autoload.pth").write_text(LINE[:length])
        folders.append(str(folder))
    out, _ = start(site, f"import sys\nfor folder in {folders}:\n    site.addsitedir(folder)\n{IMPORTS}")
    assert out == "went on\n"


def test_the_line_is_one_line_in_the_grammar_of_old_versions():
    assert LINE.count("\n") <= 1
    assert LINE.startswith("import ")  # what makes Python run it
    calls = [node for node in ast.walk(ast.parse(LINE, feature_version=OLDEST)) if isinstance(node, ast.Call)]
    (inner,) = [call.args[0] for call in calls if ast.unparse(call.func) == "exec"]
    ast.parse(ast.literal_eval(inner), feature_version=OLDEST)


REGISTRY = "import lm_eval.models\nfrom lm_eval.api.registry import model_registry\n"


@pytest.mark.parametrize("off", [{}, {"SBEVAL_NO_AUTOLOAD": "1"}, {"SBEVAL_NO_AUTOLOAD": "yes"}], ids=str)
def test_the_name_is_registered_without_importing_the_adapter_unless_that_is_switched_off(off, wheel_python):
    code = REGISTRY + "import sys\nprint(*(name in model_registry for name in ('sb', 'hf')))\n"
    code += "print(*(name in sys.modules for name in ('sbeval', 'torch')))"
    assert run_code(code, python=wheel_python, environment=off) == [f"{not off} True", f"{not off} False"]


def test_a_name_that_lm_eval_knows_is_left_alone(wheel_python):
    code = (
        "from lm_eval.api.registry import model_registry\n"
        "model_registry.register('sb', target='somebody.else:Model')\n"
        "import lm_eval.models\n"
        "print(*(target for name, target in model_registry.items() if name == 'sb'))"
    )
    assert run_code(code, python=wheel_python) == ["somebody.else:Model"]


def test_installing_the_line_where_it_cannot_be_written_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="sbeval run"):
        install_plugin.install(tmp_path / "missing")


@pytest.mark.exhaustive
def test_packaged_tasks_are_found_without_a_path(wheel_python, tmp_path):
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


def test_a_folder_that_holds_the_packaged_files_replaces_them(tmp_path):
    packaged = registered.tasks_folder()
    assert registered.with_packaged_tasks(None) == [packaged]
    assert registered.with_packaged_tasks(tmp_path) == [packaged, tmp_path]
    relative = os.path.relpath(packaged)
    assert registered.with_packaged_tasks([tmp_path, relative]) == [tmp_path, relative]


@pytest.mark.exhaustive
def test_importing_the_package_makes_the_auto_classes_load_the_family_and_changes_nothing_else(wheel_python, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "of_nobody"}')
    checkpoint = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"
    code = (
        "import sys\nhook = sys.excepthook\nprint([name for name in sys.modules if 'sbeval' in name])\nimport sbeval\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, sys.excepthook is hook)\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\nprint('sbeval.models' in sys.modules)\n"
        f"print(type(AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})).__name__, flush=True)\n"
        f"AutoConfig.from_pretrained({str(tmp_path)!r})"
    )
    process = run([wheel_python, "-c", code], environment={"SBEVAL_NO_AUTOLOAD": "1"})
    assert process.stdout.splitlines() == ["[]", "False False True", "False", "SbevalForCausalLM"]
    assert "`of_nobody`" in process.stderr


@pytest.mark.exhaustive
def test_hf_is_refused_what_only_sb_answers_before_it_loads(wheel_python, tmp_path):
    # without lm-eval's own tasks, which take ten seconds to read
    code = (
        "import lm_eval.tasks\nfrom sbeval.registered import tasks_folder\n"
        "manager = lm_eval.tasks.TaskManager(include_path=str(tasks_folder()), include_defaults=False)\n"
        f"lm_eval.simple_evaluate('hf', {f'pretrained={tmp_path}'!r}, tasks=['sb_span'], task_manager=manager)"
    )
    process = run([wheel_python, "-c", code])
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("sb_span cannot run with the model hf")


@pytest.mark.parametrize(
    ("raised", "stderr"),
    [("sbeval.UserError('expected x, found y: do z')", "expected x, found y: do z\n"), ("ValueError('other')", None)],
)
def test_only_a_user_error_is_printed_as_its_sentence(wheel_python, raised, stderr):
    process = run([wheel_python, "-c", f"import lm_eval, sbeval\nraise {raised}"])
    assert process.returncode == 1
    if stderr is None:
        assert "Traceback" in process.stderr
    else:
        assert process.stderr == stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "said"), [("sb", "Ended by SIGINT"), ("hf", "Traceback")])
def test_ctrl_c_is_one_line_where_the_model_is_ours(wheel_python, model, said):
    process = run([wheel_python, "-c", "import lm_eval\nraise KeyboardInterrupt", "--model", model])
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert process.stderr.startswith(said)
    assert len(process.stderr.splitlines()) == 1 or model == "hf"


@pytest.mark.exhaustive
def test_a_previous_hook_still_sees_other_errors(wheel_python):
    hook = "import sys\nsys.excepthook = lambda *what: print('seen', what[1])"
    assert run([wheel_python, "-c", f"{hook}\nimport lm_eval\nraise ValueError('other')"]).stdout == "seen other\n"


@pytest.mark.exhaustive
def test_lm_eval_knows_sb_and_prints_one_sentence_for_a_missing_checkpoint(wheel_python, tmp_path):
    missing = tmp_path / "missing"
    command = f"--model sb --model_args pretrained={missing} --tasks sb_stdlib_stream"
    process = run([wheel_python.with_name("lm_eval"), *command.split()])
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    assert str(missing) in process.stderr.splitlines()[-1]
