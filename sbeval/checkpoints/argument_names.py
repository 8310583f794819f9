"""Names of arguments that a model may take, read from sources: importing them takes ten seconds."""

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sbeval.errors import UserError
from sbeval.foreign_files import read_json_object

_OF_LOADING = (
    "modeling_utils.py",
    "configuration_utils.py",
    "modeling_gguf_pytorch_utils.py",
    "core_model_loading.py",
    "utils/hub.py",
    "utils/quantization_config.py",
    "integrations/accelerate.py",
    "integrations/peft.py",
    "models/auto/auto_factory.py",
    "models/auto/configuration_auto.py",
    "generation/configuration_utils.py",
)
"""Sources of transformers that read the arguments which every model takes."""


@functools.cache
def harness_arguments() -> frozenset[str]:
    """Returns the names in the signature of lm-eval's `hf`; none where its source is not as expected."""
    source = _package("lm_eval") / "models" / "huggingface.py"
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.ClassDef) and node.name == "HFLM":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return frozenset(_parameters(method)) - {"self", "kwargs"}
    return frozenset()


def names_of_a_checkpoint(folder: Path) -> frozenset[str] | None:
    """Returns all names that code of a local checkpoint's model could read as an argument.

    They are the identifiers in the sources of the model's class, of transformers' loading and of lm-eval's `hf`, with
    the keys of its config.json. A name that is not among them is read nowhere. None where files do not tell the model's
    code: the checkpoint brings its own, or no package has its type.
    """
    try:
        settings = read_json_object(folder / "config.json", "settings")
    except UserError:
        return None
    kind = settings.get("model_type")
    package = _package("transformers")
    sources = [_package("lm_eval") / "models" / "huggingface.py", *(package / file for file in _OF_LOADING)]
    if "auto_map" in settings or not isinstance(kind, str):
        return None
    if kind == "sbeval":
        own = _package("sbeval")
        sources += [*(own / "models").rglob("*.py"), *(own / "checkpoints").glob("load.py")]
    elif kind.isidentifier() and (package / "models" / kind).is_dir():
        sources += (package / "models" / kind).glob("*.py")
    else:
        return None
    return frozenset(settings).union(*map(_identifiers, sources))


def _package(name: str) -> Path:
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else Path()


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
