"""Modules and packages import each other in one direction only, and planted faults fit the code."""

import ast

import pytest
from source_tree import modules

from tests.measures import planted_faults
from tests.measures.census import circles, import_graph, rooms_of, table, unexplained_imports

MODULES = modules()


def test_imports_form_no_circle() -> None:
    graph = import_graph({name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()})
    assert circles(graph) == circles(rooms_of(graph)) == []


STRINGS = {
    "a module": 'importlib.import_module("sbeval.later.top")',
    "an attribute of a module": 'TARGET = "sbeval.later.top:Top"',
    "an attribute behind a point": 'TARGET = "sbeval.later.top.Top.method"',
    "a constant of the file": 'ROOM = "sbeval.later"\nimportlib.import_module(f"{ROOM}.top")',
    "a sum": 'ROOM = "sbeval.later"\nimportlib.import_module(ROOM + ".top")',
    "a part that is known at run time": 'NAMES = {"Top": "top"}\nload(f"sbeval.later.{NAMES[name]}")',
    "an argument of a helper": 'load("sbeval.later.top", "Top")',
}


@pytest.mark.parametrize("named_by", STRINGS)
def test_a_circle_through_a_string_is_seen(named_by: str) -> None:
    sources = {
        "sbeval.early.leaf": STRINGS[named_by],
        "sbeval.later.middle": "from sbeval.early import leaf",
        "sbeval.later.top": "from sbeval.later.middle import leaf",
        "sbeval.apart": 'LOGGER = "lm_eval.sbeval.later.top"\nTITLE = "sbeval.later.top is a module"',
    }
    graph = import_graph({name: ast.parse(source) for name, source in sources.items()})
    assert circles(graph) == [["sbeval.early.leaf", "sbeval.later.middle", "sbeval.later.top"]]
    assert circles(rooms_of(graph)) == [["sbeval.early", "sbeval.later"]]
    assert graph["sbeval.apart"] == set()


def test_an_import_in_a_function_says_why_it_is_there() -> None:
    found = {name: unexplained_imports(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_unexplained_import_in_a_function_is_found() -> None:
    body = "def f():\n    import torch  # seconds\n    import numpy\n\n    x = 1\n    import json\n"
    assert unexplained_imports(body) == [6]


def test_counts_are_printed_beside_those_of_the_last_release() -> None:
    printed = table({"product files": 1234, "new count": 5}, "0.1.0", {"product files": 1000})
    assert [line.split() for line in printed.splitlines()] == [
        ["now", "0.1.0"],
        ["product", "files", "1,234", "1,000"],
        ["new", "count", "5", "-"],
    ]


def test_every_planted_fault_has_its_one_place_and_its_tests() -> None:
    product = "\n".join(file.read_text(encoding="utf-8") for file in MODULES.values())
    assert {name: 1 for name in planted_faults.FAULTS} == {
        name: product.count(fault.code) for name, fault in planted_faults.FAULTS.items()
    }
    tests = {place for fault in planted_faults.FAULTS.values() for place in fault.tests.split()}
    assert [place for place in sorted(tests) if not (planted_faults.ROOT / "tests" / place).exists()] == []
