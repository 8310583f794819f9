"""Counts files, lines and imports of the product; CI prints them beside those of the last release.

`python tests/measures/census.py` prints both. `--release 0.2.0` stores the counts as those of the last release, in
`released.json`. No test limits a size; `tests/test_census.py` checks that imports form no circle.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASED = Path(__file__).with_name("released.json")
sys.path.insert(0, str(ROOT / "tests" / "support"))

from source_tree import ROOMS, modules  # noqa: E402  (the folder has to be on the path first)

DOTTED = re.compile(r"sbeval(\.\w+)+(:\w+(\.\w+)*)?")
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def census() -> dict[str, int]:
    files = modules()
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in files.items()}
    imports = import_graph(trees)
    importers = Counter(target for names in imports.values() for target in names)
    return {
        "product files": len(files),
        "product lines": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files.values()),
        "lines of code": sum(lines_of_code(file, trees[name]) for name, file in files.items()),
        "modules with one importer": sum(importers[name] == 1 for name in files if files[name].stem != "__init__"),
        "circles of files": len(circles(imports)),
        "circles of rooms": len(circles(rooms_of(imports))),
        "imports in functions": sum(sum(1 for _ in imports_in_functions(tree)) for tree in trees.values()),
        "of them of our modules": sum(
            any(target in files for target in targets(node, files))
            for tree in trees.values()
            for node in imports_in_functions(tree)
        ),
        "test lines": sum(
            len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / "tests").rglob("*.py")
        ),
    }


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module name to our modules that it imports or names in a string."""
    return {name: (imported(tree, trees) | named_in_strings(tree, trees)) - {name} for name, tree in trees.items()}


def targets(node: ast.stmt, files: Collection[str]) -> set[str]:
    """Our modules that one import statement names; a name taken from a package is its module where there is one."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in files}
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return set()
    named = {f"{node.module}.{alias.name}" for alias in node.names}
    return (named & set(files)) | ({node.module} & set(files) if named - set(files) else set())


def imported(tree: ast.Module, files: Collection[str]) -> set[str]:
    """Our modules that a module imports: at its top, in its functions and for type checkers."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.stmt) for name in targets(node, files)}


def named_in_strings(tree: ast.Module, files: Collection[str]) -> set[str]:
    """Our modules that a module names in strings, as it does for `importlib.import_module` and lm-eval's registry.

    A name may be followed by an attribute ("sbeval.results.schema:main"). A name built from constants of the same file
    counts. Where one part of a built name is known only at run time, every string of the file is tried in its place.
    """
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {module_named(text, files) for text in texts}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.BinOp):
            parts = parts_of(node, constants)
            if parts and (parts[0] or "").startswith("sbeval"):
                named |= {
                    module_named("".join(text if part is None else part for part in parts), files)
                    for text in ("", *texts)
                }
    return {module for module in named if module is not None}


def parts_of(node: ast.expr, constants: dict[str, str]) -> list[str | None]:
    """The parts of a built string, None for each that is known only at run time."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Name):
        return [constants.get(node.id)]
    if isinstance(node, ast.FormattedValue):
        return parts_of(node.value, constants)
    if isinstance(node, ast.JoinedStr):
        return [part for value in node.values for part in parts_of(value, constants)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return parts_of(node.left, constants) + parts_of(node.right, constants)
    return [None]


def module_named(text: str, files: Collection[str]) -> str | None:
    """The module that a string names, with or without an attribute behind it."""
    if not DOTTED.fullmatch(text):
        return None
    name = text.replace(":", ".")
    while name.count(".") and name not in files:
        name = name.rpartition(".")[0]
    return name if "." in name else None


def imports_in_functions(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields every import statement that runs when a function does."""
    seen: set[int] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in seen:
                    seen.add(id(node))
                    yield node


def unexplained_imports(source: str) -> list[int]:
    """Lines of the imports in functions that have no comment beside or above them; one comment covers a block."""
    lines = source.splitlines()
    unexplained = []
    covered_to = 0
    for node in sorted(imports_in_functions(ast.parse(source)), key=lambda node: node.lineno):
        last = node.end_lineno or node.lineno
        explained = any("#" in line for line in lines[node.lineno - 1 : last])
        explained |= lines[node.lineno - 2].lstrip().startswith("#")
        if explained or node.lineno <= covered_to:
            covered_to = last + 2
        else:
            unexplained.append(node.lineno)
    return unexplained


def room_of(module: str) -> str:
    """The room of a module: a folder of the first level below `sbeval`, or one of the three rooms beside it."""
    words = module.split(".")
    return ".".join(words[:2]) if len(words) > 2 or (len(words) == 2 and words[1] in ROOMS) else module


def rooms_of(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Imports between rooms, from imports between modules; the package's own `__init__` is no room."""
    rooms: dict[str, set[str]] = {}
    for name, imported_names in imports.items():
        if name != "sbeval":
            rooms.setdefault(room_of(name), set()).update(room_of(target) for target in imported_names)
    return {room: others - {room, "sbeval"} for room, others in rooms.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of two or more nodes that reach one another."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting.extend(new)
        reach[start] = seen
    groups = {tuple(sorted(other for other in reach[node] if node in reach.get(other, set()))) for node in graph}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def lines_of_code(file: Path, tree: ast.Module) -> int:
    """Lines that hold code: no blank ones, comments or docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def table(counts: dict[str, int], version: str, released: dict[str, int]) -> str:
    """The counts as lines of text, those of a release beside them."""
    rows = [("", "now", version)]
    rows += [(name, f"{count:,}", f"{released[name]:,}" if name in released else "-") for name, count in counts.items()]
    return "\n".join(f"{name:28}{now:>10}{before:>10}" for name, now, before in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", metavar="VERSION", help="store the counts as those of this release")
    version = parser.parse_args().release
    counts = census()
    if version is not None:
        RELEASED.write_text(json.dumps({"version": version, "counts": counts}, indent=2) + "\n", encoding="utf-8")
    last = json.loads(RELEASED.read_text(encoding="utf-8"))
    print(table(counts, last["version"], last["counts"]))


if __name__ == "__main__":
    main()
