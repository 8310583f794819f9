"""Collects names of arguments that a model could read from source files, since importing them takes ten seconds."""

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sbeval.errors import UserError
from sbeval.foreign_files import read_json_object

_LOADING_SOURCES = (
    *("modeling_utils.py", "configuration_utils.py", "modeling_gguf_pytorch_utils.py", "core_model_loading.py"),
    *("utils/hub.py", "utils/quantization_config.py", "integrations/accelerate.py", "integrations/peft.py"),
    *("models/auto/auto_factory.py", "models/auto/configuration_auto.py", "generation/configuration_utils.py"),
)
"""Source files of transformers that read the loading arguments common to all models."""


@functools.cache
def harness_arguments() -> frozenset[str]:
    """Returns the parameter names of lm-eval's `HFLM`; empty if its source has another structure than expected."""
    source = _package("lm_eval") / "models" / "huggingface.py"
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.ClassDef) and node.name == "HFLM":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return frozenset(_parameters(method)) - {"self", "kwargs"}
    return frozenset()


def names_of_a_checkpoint(folder: Path) -> frozenset[str] | None:
    """Returns all names that a local checkpoint's model could read as an argument; any other name has no effect.

    They are the keys of its config.json, and all identifiers and strings in the sources of the model's class, of
    transformers' loading and of lm-eval's `hf`. Returns None if the sources are unknown: the checkpoint has its own
    code (`auto_map`), or neither transformers nor sbeval has its model type.
    """
    try:
        settings = read_json_object(folder / "config.json", "settings")
    except UserError:
        return None
    model_type = settings.get("model_type")
    transformers = _package("transformers")
    sources = [_package("lm_eval") / "models" / "huggingface.py"]
    sources += [transformers / file for file in _LOADING_SOURCES]
    if "auto_map" in settings or not isinstance(model_type, str):
        return None
    if model_type == "sbeval":
        sbeval = _package("sbeval")
        sources += [*(sbeval / "models").rglob("*.py"), *(sbeval / "checkpoints").glob("load.py")]
    elif model_type.isidentifier() and (transformers / "models" / model_type).is_dir():
        sources += (transformers / "models" / model_type).glob("*.py")
    else:
        return None
    return frozenset(settings).union(*map(_identifiers, sources))


def _package(name: str) -> Path:
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else Path()


def _tree(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _parameters(function: ast.FunctionDef) -> Iterator[str]:
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        yield argument.arg


def _identifiers(source: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.keyword):
            names.add(node.arg or "")
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names
