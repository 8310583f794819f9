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
    for method in _class_body(_package("lm_eval") / "models" / "huggingface.py", "HFLM"):
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return frozenset(_parameters(method)) - {"self", "kwargs"}
    return frozenset()


def names_of_a_checkpoint(folder: Path) -> frozenset[str] | None:
    """Returns all names that a local checkpoint's model could read as an argument; any other name has no effect.

    They are the keys of its config.json, the fields of `SbevalConfig` or all identifiers and strings in the sources of
    transformers' model, and those in the sources of transformers' loading and of lm-eval's `hf`. Returns None if the
    sources are unknown: the checkpoint has its own code (`auto_map`), or neither transformers nor sbeval has its model
    type.
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
    fields = frozenset[str]()
    if model_type == "sbeval":
        fields = frozenset(_fields(_package("sbeval") / "models" / "config.py", "SbevalConfig"))
    elif model_type.isidentifier() and (transformers / "models" / model_type).is_dir():
        sources += (transformers / "models" / model_type).glob("*.py")
    else:
        return None
    return fields.union(settings, *map(_identifiers, sources))


def _package(name: str) -> Path:
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else Path()


def _tree(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _fields(source: Path, name: str) -> Iterator[str]:
    """Yields the names of a class's annotated fields, without those of `ClassVar`s."""
    for field in _class_body(source, name):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).startswith("ClassVar"):
            yield ast.unparse(field.target)


def _class_body(source: Path, name: str) -> list[ast.stmt]:
    """Returns the statements of a class; none if the file has no such class."""
    nodes = (node for node in ast.walk(_tree(source)) if isinstance(node, ast.ClassDef) and node.name == name)
    return next((node.body for node in nodes), [])


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
