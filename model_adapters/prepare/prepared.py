"""`prepare`: makes all changes to a loaded model in a fixed order, and keeps those that do not move its logits."""

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
    sums,
    visible_keys,
)
from sbeval.model_adapters.prepare.trial import Trial, decide

CHANGES: tuple[Change, ...] = (
    flex.CHANGE,  # first: with flex_attention on a CPU, the first forward pass would compile for minutes
    kernels.CHANGE,  # before any forward pass: it decides which stick-breaking kernels run
    hooks.CHANGE,  # before modules are replaced: a module that has an accelerate hook is never replaced
    scans.CHANGE,  # before the first long text, whose scan would take all memory; no other change touches scans
    sums.CHANGE,  # before `mlps`, whose fused modules call the row-parallel linear layers that `sums` changes
    norms.CHANGE,  # anywhere before the trial: no other change touches norms
    linear.CHANGE,  # before `mlps`, whose kernel writes the zero padding that a padded linear layer reads
    mlps.CHANGE,  # after `sums` and `linear`: it takes over the linear layers that they have made
    rotations.CHANGE,  # before `long_attention`, which copies the forward that `rotations` has made
    long_attention.CHANGE,  # after `rotations`
    visible_keys.CHANGE,  # last: it falls back on the attention that the earlier changes have made
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model that is ready to run, and what was changed in it.

    Attributes:
        model: the model that was passed to `prepare`, changed in place.
        kept: the names of the changes that were made and stayed.
        notes: one sentence for each change that was undone, with the reason.
        skip_threshold: stick-breaking attention skips older keys as soon as the weight left for them is below this
            number; None never skips.
        undos: the functions that undo the changes that stayed, in the order in which the changes were made.
    """

    model: nn.Module
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    skip_threshold: float | None = None
    undos: tuple[Undo, ...] = dataclasses.field(default=(), repr=False)

    def give_back(self) -> None:
        """Undoes every change that stayed, the last one first."""
        for undo in reversed(self.undos):
            undo()

    def to_json(self) -> dict[str, Any]:
        """Returns `kept` and all notes as JSON values, also notes that `visible_keys` made at the first long texts."""
        return {"kept": list(self.kept), "notes": [*self.notes, *visible_keys.notes(self.model)]}


def prepare(
    model: Any, tokenizer: Any, setting: Setting | None = None, changes: tuple[Change, ...] = CHANGES
) -> Prepared:
    """Makes the changes whose `wanted` is true for this run, and undoes those that move the model's logits.

    Args:
        model: a model of transformers or of this project; it is changed in place.
        tokenizer: the model's tokenizer, None if there is none.
        setting: the facts of the run; None for the defaults of `Setting`.
        changes: the changes in the order in which they are made.

    Raises:
        UserError: an argument, such as skip_threshold, does not fit the model.
    """
    setting = setting or Setting()
    trial = Trial(model, tokenizer)
    kept: dict[str, Undo] = {}
    notes: list[str] = []
    for judged, group in itertools.groupby(
        filter(lambda each: each.applies_to(setting), changes), lambda each: each.judged
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
