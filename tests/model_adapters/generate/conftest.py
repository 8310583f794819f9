"""How many slots were made."""

from typing import Any

import pytest

from sbeval.model_adapters.generate.slots.stepper import Stepper


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each stepper had."""
    made: list[int] = []
    original = Stepper.__init__

    def counted(self: Stepper, model: Any, **options: Any) -> None:
        made.append(options["slots"])
        original(self, model, **options)

    monkeypatch.setattr(Stepper, "__init__", counted)
    return made
