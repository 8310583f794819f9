"""Parts of reference pages, generated from the commands, the settings, the task files and the records.

`python docs/generate/parts.py` writes them into the committed pages. A part without an end mark depends on installed
versions and is filled in when the site is built.
"""

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from sbeval.commands.cli import app
from sbeval.model_adapters.options import AdapterOptions
from sbeval.policy import Rule
from sbeval.results.schema import FIELDS_OF, fields_of
from sbeval.settings import Settings, described
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun
from sbeval.tasks.packaged import definitions, is_group
from sbeval.tasks.user_options import metadata_keys

ROOT = Path(__file__).parents[2]
_COLUMNS = "100"
_COMMITTED = re.compile(r"^<!-- generated: (\w+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_KINDS = {
    "tasks.perplexity": "Perplexity",
    "tasks.ruler": "RULER",
    "tasks.graded": "Graded tasks",
    "tasks.mrcr": "MRCR",
    "tasks.recall": "Recall and attention spans",
}


def commands() -> str:
    """Returns the `--help` text of every command."""
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    texts = [f"## sbeval {name}\n\n```text\n{_help(name)}\n```" for name in names]
    return "\n\n".join([f"```text\n{_help()}\n```", *texts])


def command_list() -> str:
    """Returns a table of the commands."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [(f"`sbeval {name}`", (command.help or "").partition("\n\n")[0]) for name, command in commands.items()]
    return _table(("command", "what it does"), rows)


def _help(*name: str) -> str:
    printed = io.StringIO()
    width, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), _COLUMNS
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            app([*name, "--help"], prog_name="sbeval", standalone_mode=False)
    finally:
        del os.environ["COLUMNS"]
        if width is not None:
            os.environ["COLUMNS"] = width
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def model_arguments() -> str:
    """Returns a table of `sb`'s arguments beyond those of lm-eval's `hf`."""
    return _keys("argument", AdapterOptions)


def metadata() -> str:
    """Returns a table for each kind of task: the keys of `--metadata`."""
    tables = []
    for title, keys in metadata_keys():
        rows = [(f"`{name}`", meaning) for name, meaning in keys]
        tables.append(f"### {title[0].upper()}{title[1:]}\n\n{_table(('key', 'meaning'), rows)}")
    return "\n\n".join(tables)


def sweep_file() -> str:
    """Returns tables of the keys of a sweep's file."""
    tables = (("key of the file", Sweep), ("key of a checkpoint", SweepCheckpoint), ("key of a run", SweepRun))
    return "\n\n".join(_keys(title, kind) for title, kind in tables)


def gate_file() -> str:
    """Returns a table of the keys of a rule of a gate."""
    return _keys("key", Rule)


def tasks() -> str:
    """Returns a table for each kind of task, and one of the groups."""
    single = {name: settings for name, settings in definitions().items() if not is_group(settings)}
    groups = {name: settings for name, settings in definitions().items() if is_group(settings)}
    rows: dict[str, list[tuple[str, ...]]] = {title: [] for title in _KINDS.values()}
    for name, settings in single.items():
        title = next(title for part, title in _KINDS.items() if part in str(settings["class"]))
        rows[title].append((f"`{name}`", _class_summary(str(settings["class"])), *_corpus_and_models(settings)))
    header = ("task", "what it is", "text", "models")
    parts = [f"### {title}\n\n{_table(header, listed)}" for title, listed in rows.items()]
    members = [(f"`{name}`", ", ".join(map(_member, settings["task"]))) for name, settings in groups.items()]
    return "\n\n".join([f"### Groups\n\n{_table(('group', 'members'), members)}", *parts])


def _member(member: str | Mapping[str, Any]) -> str:
    if isinstance(member, str):
        return f"`{member}`"
    shots = f" ({member['num_fewshot']}-shot)" if "num_fewshot" in member else ""
    return f"`{member.get('task') or member.get('group')}`{shots}"


def _corpus_and_models(settings: Mapping[str, Any]) -> tuple[str, str]:
    models = "`sb`" if str(settings["class"]).endswith(".SpanTask") else "scores tokens"
    models = "any" if settings.get("output_type") == "generate_until" else models
    return str(settings.get("dataset_name") or "generated"), models


def _class_summary(path: str) -> str:
    """Returns the first line of a class's docstring, without importing its module, which may need torch."""
    module, _, name = path.rpartition(".")
    file = ROOT / (module.removeprefix("sbeval.").replace(".", "/") + ".py")
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    text = next(ast.get_docstring(node) for node in classes if node.name == name) or ""
    return text.partition("\n")[0]


def records() -> str:
    """Returns a table of the fields of each record of a results file."""
    tables = []
    for record in FIELDS_OF:
        rows = [(f"`{field.name}`", f"`{field.kind}`", field.meaning) for field in fields_of(record)]
        tables.append(f"### {record.__name__}\n\n{_table(('field', 'type', 'meaning'), rows)}")
    return "\n\n".join(tables)


def _keys(title: str, kind: type[Settings]) -> str:
    return _table((title, "meaning"), [(f"`{name}`", meaning) for name, meaning in described(kind)])


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


PARTS: dict[str, Callable[[], str]] = {
    "command_list": command_list,
    "commands": commands,
    "model_arguments": model_arguments,
    "metadata": metadata,
    "tasks": tasks,
    "records": records,
    "sweep_file": sweep_file,
    "gate_file": gate_file,
}


def rewritten(page: str) -> str:
    """Returns a page with its generated parts updated."""
    return _COMMITTED.sub(lambda part: f"<!-- generated: {part[1]} -->\n\n{PARTS[part[1]]()}\n\n<!-- end -->", page)


def pages() -> list[Path]:
    """Returns the pages with committed generated parts."""
    return [
        page for page in sorted((ROOT / "docs").rglob("*.md")) if _COMMITTED.search(page.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
