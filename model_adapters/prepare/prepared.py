"""`prepare`: every change to a loaded model in its order, of which those stay that leave the model's logits alone."""

import dataclasses
import itertools
from typing import Any

from torch import nn

from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.changes import (
    flex,
    hooks,
    kernels,
    linear,
    long_attention,
    mlps,
    norms,
    rotations,
    scans,
    seen_keys,
    sums,
)
from sbeval.model_adapters.prepare.trial import Trial, decide

CHANGES: tuple[Change, ...] = (
    flex.CHANGE,  # first: on a CPU the model would compile for minutes at its first forward pass
    kernels.CHANGE,  # before any forward pass, since it decides which kernels of this family run
    hooks.CHANGE,  # before parts are replaced, since a part with a hook of its own is not
    scans.CHANGE,  # before the first long text, whose scan would take all memory; it touches no other part
    sums.CHANGE,  # before MLPs, which call the row-parallel linear layers that it changes
    norms.CHANGE,  # anywhere before the trial: nothing else touches norms
    linear.CHANGE,  # before MLPs, which write the padding that an aligned linear layer reads
    mlps.CHANGE,  # after sums and linear layers, which it takes as they are by then
    rotations.CHANGE,  # before attention to long texts, which copies the forward that rotations have copied
    long_attention.CHANGE,  # after rotations
    seen_keys.CHANGE,  # last: it falls back on the attention that the model has by then
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model that is ready to run.

    Attributes:
        model: the model that was given, changed in place.
        kept: names of the changes that were made and stayed.
        notes: a sentence for each change that was undone, and why.
        skip_threshold: the stick below which older keys are skipped, None for never.
    """

    model: nn.Module
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skip_threshold: float | None = None
    undos: tuple[Undo, ...] = dataclasses.field(default=(), repr=False)

    def give_back(self) -> None:
        """Undoes every change that stayed, the newest first."""
        for undo in reversed(self.undos):
            undo()

    def to_json(self) -> dict[str, Any]:
        """Returns the names of the changes and the notes JSON-ready, with notes that were made while the model ran."""
        return {"kept": list(self.kept), "notes": [*self.notes, *seen_keys.notes(self.model)]}


def prepare(
    model: Any, tokenizer: Any, setting: Setting | None = None, changes: tuple[Change, ...] = CHANGES
) -> Prepared:
    """Makes every change that a run wants, in order, and undoes those that change the model's logits.

    Args:
        model: a model of transformers, or of this family; it is changed in place.
        tokenizer: its tokenizer, None where there is none.
        setting: the facts of the run.
        changes: the changes, in their order.

    Raises:
        UserError: a setting does not fit the model.
    """
    setting = setting or Setting()
    trial = Trial(model, tokenizer)
    kept: dict[str, Undo] = {}
    notes: list[str] = []
    for judged, group in itertools.groupby(
        filter(lambda each: each.wanted(setting), changes), lambda each: each.judged
    ):
        if judged:
            verdict = decide(trial, tuple(group), setting)
            kept |= verdict.kept
            notes += verdict.notes
        else:
            made = {change.name: change.apply(model, setting) for change in group}
            kept |= {name: undo for name, undo in made.items() if undo is not None}
    return Prepared(
        model=model,
        kept=tuple(kept),
        notes=tuple(notes),
        skip_threshold=kernels.skip_threshold_in_force(model, setting) if setting.causal else None,
        undos=tuple(kept.values()),
    )
