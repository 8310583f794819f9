"""The arrows `tests -> {reports, model_adapters, tasks} -> sbeval`, in the source and in fresh processes."""

import ast
import functools
import re
from pathlib import Path

import pytest
from fresh_process import run_code
from source_tree import ROOMS, layer, modules

from tests.marks import exhaustive

MODULES = modules()
# within reports: build -> {kinds, write} -> {section, pairs} -> figures -> analyse -> read
READING = {"analyse", "read"}
SECTION = {"section", "figures"} | READING
REPORT_ARROWS = {
    "read": set(),
    "analyse": {"read"},
    "figures": {"read"},
    "section": {"figures"} | READING,
    "kinds": SECTION | {"pairs"},
    "write": SECTION,
    "build": {"write", "kinds"} | SECTION,
    "publish": {"build"} | READING,
    "spreads": {"build"} | READING,
    "pairs": READING,
    "judge": {"pairs", "build"} | READING,
    "gate": {"judge", "pairs"} | READING,
}
# within the core, a room imports those before it, at its top and in its functions
CORE_ROOMS = (
    *("processes", "attention", "keeping", "models", "results", "checkpoints", "corpora", "caches", "scoring"),
    "fingerprint",
    *("harness", "sweep", "demo", "inspection", "planning", "training", "paper", "commands"),
)
# within model_adapters: open -> prepare -> session, self-test -> {score, generate} -> lm
LATER_STEPS = {
    "lm": set(),
    "open": {"session", "self_test", "score", "generate", "record", "lm"},
    "session": {"score", "record", "lm"},
    "self_test": {"score", "lm"},
    "record": {"self_test", "score", "generate", "lm"},
    "score": {"generate", "lm"},
    "generate": {"score", "lm"},
}
MAY_NAME_ROOMS = {"sbeval.commands.cli", "sbeval.evaluation", "sbeval.plugin", "sbeval.registered"}
PREPARE = [name for name in MODULES if name.startswith("sbeval.model_adapters.prepare")]
ROOM_NAME = re.compile(rf"sbeval\.({'|'.join(ROOMS)})\b[\w.:]*")


@functools.cache
def imported_names(file: Path) -> set[str]:
    """Every absolute import of a file, those inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def rooms_named_in_strings(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if ROOM_NAME.fullmatch(text)}


def imported_from(start: str, *, by: str = "") -> dict[str, set[str]]:
    """Names beginning with `start` that each module imports, for modules whose layer is `by` or all modules."""
    chosen = {name: file for name, file in MODULES.items() if not by or layer(name) == by}
    names = {
        module: {name for name in imported_names(file) if name.startswith(start)} for module, file in chosen.items()
    }
    assert any(names.values())
    return names


def test_a_module_imports_no_other_room() -> None:
    rooms = {module: {*map(layer, names)} - {"core"} for module, names in imported_from("sbeval.").items()}
    assert {module: others for module, found in rooms.items() if (others := found - {layer(module)})} == {}


def test_a_room_of_the_core_imports_those_before_it() -> None:
    later = {}
    for module, names in imported_from("sbeval.", by="core").items():
        room = module.split(".")[1] if "." in module else ""
        after = set(CORE_ROOMS[CORE_ROOMS.index(room) + 1 :]) if room in CORE_ROOMS else set()
        later[module] = {name.split(".")[1] for name in names} & after
    assert {module: rooms for module, rooms in later.items() if rooms} == {}


def test_every_room_of_the_core_has_its_place() -> None:
    core = [(name.split(".")[1:2], file.parent.name) for name, file in MODULES.items() if layer(name) == "core"]
    assert {folder for rooms, folder in core if folder in rooms} == set(CORE_ROOMS)


def report_room(module: str) -> str:
    return ".".join(module.split(".")[2:3])


def test_reports_import_in_one_direction() -> None:
    wrong = {}
    for module, names in imported_from("sbeval.reports", by="reports").items():
        if room := report_room(module):
            wrong[module] = {*map(report_room, names)} - REPORT_ARROWS[room] - {room}
    assert {module: rooms for module, rooms in wrong.items() if rooms} == {}


def test_only_the_command_the_plugin_and_evaluate_name_a_room() -> None:
    core = {name: file for name, file in MODULES.items() if layer(name) == "core"}
    assert {name for name, file in core.items() if rooms_named_in_strings(file)} <= MAY_NAME_ROOMS


def step_of(module: str) -> str:
    return module.removeprefix("sbeval.model_adapters.").partition(".")[0]


def test_a_loaded_model_goes_one_way() -> None:
    wrong = {}
    for module, names in imported_from("sbeval.model_adapters", by="model_adapters").items():
        if module != "sbeval.model_adapters":
            wrong[module] = {*map(step_of, names)} & LATER_STEPS.get(step_of(module), {"lm"})
    assert {module: steps for module, steps in wrong.items() if steps} == {}


def test_a_room_is_never_imported_by_its_folder_name() -> None:
    found = {module: {name.partition(".")[0] for name in imported_names(file)} for module, file in MODULES.items()}
    assert {module: rooms for module, names in found.items() if (rooms := names & set(ROOMS))} == {}


HEAVY = ["torch", "lm_eval", "transformers"]
LIGHT = [*HEAVY, "numpy", "pydantic"]
ALONE = {
    "every command": (["sbeval", "sbeval.plugin", "sbeval.commands.cli", "sbeval.results.records"], LIGHT),
    "a sweep": (["sbeval.sweep.command", "sbeval.sweep.execute"], ["numpy", *HEAVY]),
    "reports": ([], ["sbeval.tasks", "sbeval.model_adapters", "pydantic", *HEAVY]),
    "core": ([], ["sbeval.tasks", "sbeval.model_adapters", "sbeval.reports"]),
    "tasks": ([], ["sbeval.model_adapters", "sbeval.reports"]),
    "model_adapters": ([], ["sbeval.tasks", "sbeval.reports"]),
}


@pytest.mark.parametrize(
    "place", ["every command", "a sweep", "reports", *exhaustive("core", "tasks", "model_adapters")]
)
def test_what_starts_a_command_imports_nothing_heavy_and_each_layer_no_other(place: str) -> None:
    names, others = ALONE[place]
    assert loaded_by(names or [name for name in MODULES if layer(name) == place], others) == []


def test_what_prepares_models_imports_neither_lm_eval_nor_the_rest_of_the_adapter() -> None:
    names = {name for module in PREPARE for name in imported_names(MODULES[module])}
    held = {name for name in names if layer(name) == "model_adapters" or name.partition(".")[0] == "lm_eval"}
    assert held
    assert all(name.startswith("sbeval.model_adapters.prepare.") for name in held)


@pytest.mark.exhaustive
def test_what_prepares_models_runs_without_lm_eval() -> None:
    rest = [name for name in MODULES if layer(name) == "model_adapters" and name not in PREPARE]
    assert loaded_by(PREPARE, ["lm_eval", *rest]) == ["sbeval.model_adapters"]  # the folder around it


def loaded_by(names: list[str], unwanted: list[str]) -> list[str]:
    """Imports modules in a fresh process and returns the forbidden modules that were imported too."""
    imports = "\n".join(f"import {name}" for name in names)
    return run_code(f"import sys\n{imports}\nprint(*(set(sys.modules) & set({unwanted!r})), sep='\\n', end='')")
