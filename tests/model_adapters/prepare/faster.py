"""Models whose parts are replaced as on a GPU."""

from typing import Any

from sbeval.model_adapters.prepare.change import Change, Setting
from sbeval.model_adapters.prepare.prepared import CHANGES, Prepared, prepare

ON_GPU = Setting(replaces_modules=True)
PARTS = tuple(change for change in CHANGES if change.judged)


def replaced(model: Any, *, tokenizer: Any = None, changes: tuple[Change, ...] = PARTS, **setting: Any) -> Prepared:
    return prepare(model, tokenizer, Setting(replaces_modules=True, **setting), changes)


def make_faster(model: Any) -> bool:
    """Whether any part was replaced for good."""
    return bool(replaced(model).kept)
