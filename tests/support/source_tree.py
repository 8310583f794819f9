"""The checkout's packages, found in its folders and not in pyproject.toml."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("tasks", "model_adapters", "reports")


def package_folders() -> dict[str, Path]:
    """Returns import name to folder."""
    folders = {"sbeval": ROOT / "sbeval"} | {f"sbeval.{room}": ROOT / room for room in ROOMS}
    return {
        ".".join([name, *marker.parent.relative_to(top).parts]): marker.parent
        for name, top in folders.items()
        for marker in sorted(top.rglob("__init__.py"))
    }


def modules() -> dict[str, Path]:
    """Returns import name to file of every module, packages included."""
    found = {}
    for name, folder in package_folders().items():
        for file in sorted(folder.glob("*.py")):
            found[name if file.stem == "__init__" else f"{name}.{file.stem}"] = file
    return found


def layer(module: str) -> str:
    """Returns the room a module belongs to, or "core"."""
    second = module.split(".")[1] if "." in module else ""
    return second if second in ROOMS else "core"
