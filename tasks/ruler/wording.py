"""Reads the wording of RULER and LongBench v2 from the installed lm-eval without importing it.

Importing lm-eval's RULER modules would download NLTK data and change global random state. Their sources are therefore
parsed with `ast`, and only literal constants are read. The wording depends on lm-eval's version, which is recorded.
"""

import ast
import contextlib
import functools
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.foreign_files import parse_task_yaml
from sbeval.tasks.packaged import lm_eval_tasks


class NiahWording(NamedTuple):
    """The wording of the needle-in-a-haystack tasks.

    Attributes:
        template: instruction and question, with `{type_needle_v}`, `{context}` and `{query}`.
        needle: one needle, with `{type_needle_v}`, `{key}` and `{value}`.
        noise: one unit of the noise haystack.
        prefix_one: answer prefix for questions about one value, with `{type_needle_v}` (singular) and `{query}`.
        prefix_many: answer prefix for questions about several values.
    """

    template: str
    needle: str
    noise: str
    prefix_one: str
    prefix_many: str


class TaskWording(NamedTuple):
    """The wording of a task without needles: the text before and after the haystack, and the start of the answer."""

    opening: str
    closing: str
    answer_prefix: str


def lm_eval_version() -> str:
    """Returns the version of the installed lm-eval, on which the wording depends."""
    return importlib.metadata.version("lm-eval")


@functools.cache
def _module(name: str) -> ast.Module:
    path = (lm_eval_tasks() or Path()) / "ruler" / f"{name}.py"
    if not path.is_file():
        raise _missing("any text", name)
    return ast.parse(path.read_text(encoding="utf-8"))


def _missing(what: str, module: str) -> UserError:
    return UserError(
        f"RULER's wording is read from lm-eval's sources, but tasks/ruler/{module}.py of lm-eval {lm_eval_version()} "
        f"does not hold {what}; install lm-eval 0.4.13."
    )


def _assigned(module: str, name: str, function: str | None = None) -> Any:
    """Returns the first literal that is assigned to `name`, at the top level of a module or in one of its functions."""
    nodes: Iterable[ast.AST] = _module(module).body
    if function is not None:
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function]
        nodes = [inner for node in functions for inner in ast.walk(node)]
    for node in nodes:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node.value)
    raise _missing(f"a literal {name}{f' in {function}' if function else ''}", module)


def _as_template(node: ast.expr) -> str:
    """Turns an f-string's syntax tree into a `str.format` template; `{x[:-1]}` becomes `{x}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    text = ""
    for value in node.values if isinstance(node, ast.JoinedStr) else []:
        if isinstance(value, ast.Constant):
            text += str(value.value)
        elif isinstance(value, ast.FormattedValue):
            inner = value.value.value if isinstance(value.value, ast.Subscript) else value.value
            text += "{" + ast.unparse(inner) + "}"
    return text


@functools.cache
def niah_wording() -> NiahWording:
    """Reads the wording of the needle-in-a-haystack tasks.

    Raises:
        UserError: the installed lm-eval does not hold it in the expected places.
    """
    prefixes = [
        (_as_template(value.body), _as_template(value.orelse))
        for node in ast.walk(_module("prepare_niah"))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "gen_prefix" and isinstance(value, ast.IfExp)
    ]
    if len(prefixes) != 1:
        raise _missing("one pair of answer prefixes", "prepare_niah")
    return NiahWording(
        template=_assigned("niah_utils", "TEMPLATE"),
        needle=_assigned("prepare_niah", "NEEDLE"),
        noise=_assigned("prepare_niah", "haystack", "get_haystack").strip(),
        prefix_one=prefixes[0][0],
        prefix_many=prefixes[0][1],
    )


@functools.cache
def task_wording(task: str) -> TaskWording:
    """Reads the wording of the task "vt", "cwe", "fwe" or "qa".

    Some of its strings hold the format fields `{query}` and `{num_v}`.
    """
    module = f"{task}_utils"
    config = _assigned(module, "CONFIG")
    config = config.get("variable_tracking", {}) if task == "vt" else config
    if not {"template", "answer_prefix"} <= config.keys():
        raise _missing("a template and an answer prefix", module)
    opening, closing = config["template"].split("{context}")
    return TaskWording(opening, closing, config["answer_prefix"].strip())


@functools.cache
def qa_document() -> str:
    """Reads the format string of a document in question answering, with the fields `{i}` and `{document}`."""
    return str(_assigned("qa_utils", "DOCUMENT_PROMPT"))


@functools.cache
def long_bench_wording() -> tuple[str, str, str, list[str]]:
    """Reads the prompt of LongBench v2 from lm-eval's YAML files.

    Returns:
        The text before the context, a Jinja template of the text after it, the data set's id, and its configurations.

    Raises:
        UserError: the installed lm-eval does not hold them.
    """
    folder = (lm_eval_tasks() or Path()) / "longbench2"
    try:
        common = parse_task_yaml((folder / "_longbench_common_yaml").read_text(encoding="utf-8"))
        opening, closing = common["doc_to_text"].split("{{context}}")
        tasks = [parse_task_yaml(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("[!_]*.yaml"))]
        return opening, closing, common["dataset_path"], [task["dataset_name"] for task in tasks]
    except (OSError, KeyError, ValueError) as error:
        raise UserError.expected(
            f"the wording of LongBench v2 in {folder}", found="none", remedy="install lm-eval 0.4.13"
        ) from error


def qa_source(dataset: str) -> str:
    """Reads the address from which lm-eval downloads "squad" or "hotpotqa"."""
    for node in _module("qa_utils").body:
        if isinstance(node, ast.FunctionDef) and node.name == f"read_{dataset}":
            for default in node.args.defaults:
                if isinstance(default, ast.Constant) and str(default.value).startswith("https://"):
                    return str(default.value)
    raise _missing(f"the address of {dataset}", "qa_utils")
