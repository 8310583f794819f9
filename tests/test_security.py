"""What docs/security.md promises never happens: no source holds a call that could, and the document names its tests."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from fresh_process import run
from source_tree import ROOT, modules

from sbeval.errors import UserError
from sbeval.foreign_files import parse_task_yaml, parse_yaml

MODULES = modules()
DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
CALLS = re.compile(
    r"(c?[pP]ickle|dill|cloudpickle|joblib|marshal|shelve)\.(loads?|open|Unpickler)|torch\.(jit\.)?load|torch\.hub\.\w+"
    r"|yaml\.(load|load_all|full_load|full_load_all|unsafe_load|unsafe_load_all)|eval|exec|compile|__import__"
    r"|os\.(system|popen|exec\w*|spawn\w*)|commands\.\w+|\w+\.(extract|extractall|unpack_archive)"
)
# by module: a call that is safe as it stands, and why
ALLOWED = {
    "sbeval.checkpoints.files": {"torch.load(path, map_location='cpu', weights_only=True, mmap=True)"},
    "sbeval.corpora.archives": {"archive.extractall(folder, **safe)"},
    "sbeval.foreign_files": {"yaml.load(text, _Loader)", "yaml.load(text, _TaskLoader)"},
}


def dangerous(source: str) -> set[str]:
    """Calls that run or unpickle what a file holds, start a shell, or write where an archive says."""
    found = set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, given = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
        asked = {"shell": "True", "allow_pickle": "True", "trust_remote_code": "True", "weights_only": "False"}
        if CALLS.fullmatch(name) or any(given.get(word) == value for word, value in asked.items()):
            found.add(ast.unparse(call))
    return found


def test_the_search_finds_each_of_them() -> None:
    sources = (
        *("import pickle\npickle.load(file)", "pickle.loads(b'')", "pickle.Unpickler(file)", "torch.load(path)"),
        *("torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)", "yaml.load(text, yaml.Loader)"),
        *("yaml.unsafe_load(text)", "eval(text)", "exec(text)", "os.system('ls')", "subprocess.run('ls', shell=True)"),
        *("archive.extractall(folder)", "archive.extract(member, folder)", "shutil.unpack_archive(path, folder)"),
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    )
    assert [source for source in sources if len(dangerous(source)) != 1] == []


def test_no_module_holds_such_a_call() -> None:
    found = {module: dangerous(file.read_text(encoding="utf-8")) for module, file in MODULES.items()}
    assert {module: held for module, held in found.items() if held} == ALLOWED


def test_no_lint_rule_is_silenced_elsewhere() -> None:
    silenced = {module for module, file in MODULES.items() if re.search(r"noqa:.*\bS\d", file.read_text())}
    assert silenced == {"sbeval.corpora.archives", "sbeval.foreign_files"}
    chosen = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]
    assert {rule for rule in re.findall(r"\bS\d{3}\b", DOCUMENT)} <= set(chosen)


def test_the_readers_of_yaml_make_no_objects() -> None:
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse_task_yaml("!!python/object/apply:os.getcwd []")
    with pytest.raises(UserError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []")
    assert parse_task_yaml("doc_to_text: !function utils.text") == {"doc_to_text": "utils.text"}


def test_code_of_a_checkpoint_is_trusted_nowhere_by_default() -> None:
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.args, *node.args.kwonlyargs]
                defaults = [*[None] * (len(node.args.args) - len(node.args.defaults)), *node.args.defaults]
                given = dict(zip([one.arg for one in arguments], [*defaults, *node.args.kw_defaults], strict=True))
                default = given.get("trust_remote_code")
                assert default is None or ast.unparse(default) == "False", f"{file}: {node.name}"


def test_the_document_names_tests_that_there_are() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", DOCUMENT)
    assert len(named) > 8
    for file, name in named:
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


OFFLINE = """
import os, socket, sys
def refuse(*what, **more):
    print("CONNECTS", what, flush=True)
    if os.environ["HF_HUB_OFFLINE"] == "0":
        os._exit(0)  # seen; nobody waits for the retries
    raise OSError("no network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
import sbeval.tasks
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from sbeval.model_adapters.lm import StickBreakingLM
lm = StickBreakingLM({checkpoint!r}, device="cpu")
metadata = {{"pretrained": {checkpoint!r}, "data_path": {text!r}, "context_lengths": [64]}}
manager = TaskManager(include_path=list(sbeval.tasks.__path__), include_defaults=False, metadata=metadata)
found = evaluate(lm=lm, task_dict=manager.load(["sb_text_stream"]), limit=1, bootstrap_iters=0)
print("NLL", found["results"]["sb_text_stream"]["nll@0000064,none"])
try:
    StickBreakingLM("owner/model-of-the-hub", device="cpu")
except sbeval.UserError as error:
    print(error)
"""


@pytest.mark.exhaustive
def test_offline_nothing_connects(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Beautiful is better than ugly. " * 200)
    checkpoint = str(ROOT / "sbeval" / "demo" / "checkpoints" / "rope")
    code = OFFLINE.format(checkpoint=checkpoint, text=str(tmp_path / "text.txt"))
    folders = {name: str(tmp_path / name) for name in ("SBEVAL_CACHE", "HF_HOME")}
    offline = run([sys.executable, "-c", code], environment={**folders, "HF_HUB_OFFLINE": "1"})
    assert re.search(r"NLL \d.*\nExpected a model at pretrained=owner/", offline.stdout), offline.stderr[-2000:]
    assert "CONNECTS" not in offline.stdout
    online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    assert "CONNECTS" in run([sys.executable, "-c", code], environment={**folders, **online}).stdout
