"""The trial: tests whether changes have moved a model's logits, and if so, finds and undoes the changes that did.

The model reads one short text before and after the changes. A fused kernel rounds in other places than the modules that
it replaces, so the logits are never exactly the same. How far rounding may move them is measured on the model: it reads
the text again while random rounding errors are added to the output of each module without submodules. Differences are
relative: the norm of the difference at a position, divided by the norm of the logits minus their mean.

Shape suffixes: L tokens, V vocabulary.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbeval.errors import first_line
from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.processes import ranks
from sbeval.scoring.body import no_cache
from sbeval.scoring.rounding import least, rounded_anew, shares_apart

logger = logging.getLogger(__name__)

SAMPLE_TOKENS = 64
DRAWS = 4
_FEW_POSITIONS = 16  # with fewer positions, the mean difference depends much on the random errors
TIMES_ROUNDING = 2.0
"""The limit as a multiple of the mean effect of random errors: kernels round not only at the outputs of modules.

For SmolLM2-135M in bf16 the limit is a relative difference of 0.12. Fused norms move the logits by 0.044, and leaving
out the MLP of one layer moves them by 0.21 or more. For a model with random weights the limit is 0.042; leaving out an
MLP moves the logits by 0.076, and a wrong rotary embedding by 0.070.
"""


class Trial:
    """A model, and its logits for a sample of text before it is changed.

    Attributes:
        model: the model.
        failure: why the model gives no logits to compare, None if it does.
    """

    def __init__(self, model: Any, tokenizer: Any = None, tokens: Sequence[int] | None = None) -> None:
        self.model, self._tokenizer, self._tokens = model, tokenizer, tokens
        self._expected_LV: Tensor | None = None
        self._limit: float | None = None
        self.failure: str | None = None

    def begin(self) -> bool:
        """Reads the sample with the unchanged model, and returns whether that gave any finite logits."""
        if self._expected_LV is None and self.failure is None:
            self._expected_LV = self._logits()
            if self._expected_LV is not None and not bool(self._expected_LV.isfinite().any()):
                self._expected_LV, self.failure = None, "its logits are NaN"
        return self._expected_LV is not None

    def difference(self) -> float:
        """Returns the relative difference between the present logits and those of `begin`, as a mean over positions.

        It is infinity if the model does not run or gives NaN; if it does not run, `failure` says why.
        """
        assert self._expected_LV is not None
        self.failure = None
        found_LV = self._logits()
        if found_LV is None:
            return math.inf
        if found_LV.shape != self._expected_LV.shape or found_LV.dtype != self._expected_LV.dtype:
            self.failure = f"logits of shape {tuple(found_LV.shape)} in {found_LV.dtype}"
            return math.inf
        return float(shares_apart(found_LV, self._expected_LV).mean())

    @property
    def least(self) -> float:
        """The relative difference that rounding to the dtype explains in any model."""
        assert self._expected_LV is not None
        return least(self._expected_LV.dtype, self._expected_LV.device)

    def limit(self) -> float:
        """Returns the largest relative difference that rounding explains; call it while the model is unchanged."""
        assert self._expected_LV is not None
        if self._limit is None:
            self._limit = rounding_limit(self.model, self._logits, self._expected_LV)
        return self._limit

    @torch.no_grad()
    def _logits(self) -> Tensor | None:
        model = self.model
        try:
            tokens = self._tokens
            if tokens is None:
                embeddings = model.get_input_embeddings().weight.shape[0]
                tokens = self._tokens = sample_tokens(self._tokenizer, embeddings, self._length())
            ids_1L = torch.tensor(tokens, device=model.device)[None]
            logits: Tensor = model(input_ids=ids_1L, **no_cache(model)).logits[0]
        except Exception as error:  # the code of a model can raise anything
            self.failure = first_line(error)
            return None
        return logits

    def _length(self) -> int:
        """Returns the length of the sample in tokens: `SAMPLE_TOKENS`, or less if the model has fewer positions."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return min(SAMPLE_TOKENS, positions) if isinstance(positions, int) and positions > 0 else SAMPLE_TOKENS


@torch.no_grad()
def rounding_limit(model: Any, read: Callable[[], Tensor | None], expected_LV: Tensor) -> float:
    """Returns the largest relative difference of a model's logits, as a mean over positions, that rounding explains.

    `read` computes the logits that `expected_LV` holds. It is called several times while random rounding errors are
    added to the outputs of modules.
    """
    moved = []
    for seed in range(DRAWS):
        with rounded_anew(model, seed=seed, times=1.0):
            found_LV = read()
        if found_LV is not None and math.isfinite(share := float(shares_apart(found_LV, expected_LV).mean())):
            moved.append(share)
    typical = max(moved, default=0.0) if len(expected_LV) < _FEW_POSITIONS else sum(moved) / max(1, len(moved))
    return max(least(expected_LV.dtype, expected_LV.device), TIMES_ROUNDING * typical)


def same_logits(model: Any, read: Callable[[], Tensor], found_LV: Tensor) -> bool:
    """Whether rounding explains the difference between `found_LV` and the logits that `read` returns."""
    with torch.no_grad():
        expected_LV = read()
    difference = float(shares_apart(found_LV, expected_LV).mean())
    if difference <= least(expected_LV.dtype, expected_LV.device):
        return True
    return difference <= rounding_limit(model, read, expected_LV)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The names of the changes that stay with the functions that undo them, and a sentence for each undone change."""

    kept: Mapping[str, Undo] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()


def decide(trial: Trial, changes: Sequence[Change], setting: Setting) -> Verdict:
    """Makes changes to a model and undoes each change that moves the logits further than rounding explains.

    If every rank holds a copy of the model, rank 0 runs the trial and the other ranks make the changes that it kept. If
    the model is tensor parallel, all ranks run it, and all use the differences that rank 0 measures.
    """
    if setting.processes > 1 and setting.rank > 0:
        names, notes = _broadcast(None)
        made = {change.name: change.apply(trial.model, setting) for change in changes if change.name in names}
        return Verdict(kept={name: undo for name, undo in made.items() if undo is not None}, notes=notes)
    verdict = _decide(trial, changes, setting)
    if setting.processes > 1:
        _broadcast((list(verdict.kept), list(verdict.notes)))
    if ranks.is_first_process():
        for note in verdict.notes:
            logger.warning("%s", note)
    return verdict


def _decide(trial: Trial, changes: Sequence[Change], setting: Setting) -> Verdict:
    name = type(trial.model).__name__
    if not _agreed(trial.begin(), setting):
        return Verdict(notes=[f"{name} stays as it is: it gives no logits to compare with ({trial.failure})"])
    made = _make(trial.model, changes, setting)
    if not made:
        return Verdict()
    difference = _agreed(trial.difference(), setting)
    if difference <= trial.least:
        return Verdict(kept=made)
    _undo(made)
    limit = _agreed(trial.limit(), setting)
    if difference <= limit:
        return Verdict(kept=_make(trial.model, changes, setting))
    return _one_by_one(trial, changes, setting, limit)


def _one_by_one(trial: Trial, changes: Sequence[Change], setting: Setting, limit: float) -> Verdict:
    """Makes the changes one by one, and undoes each change after which the logits differ by more than `limit`."""
    name = type(trial.model).__name__
    kept: dict[str, Undo] = {}
    notes: list[str] = []
    for change in changes:
        if (undo := change.apply(trial.model, setting)) is None:
            continue
        difference = _agreed(trial.difference(), setting)
        if difference <= limit:
            kept[change.name] = undo
            continue
        undo()
        if trial.failure is None:
            fault = f"changed the logits of {name} by {difference:.2g} (limit {limit:.2g})"
        else:
            fault = f"cannot be used with {name} ({trial.failure})"
        notes.append(f"{change.name} {fault}; they are switched off")
    return Verdict(kept=kept, notes=notes)


def _make(model: Any, changes: Sequence[Change], setting: Setting) -> dict[str, Undo]:
    made = {change.name: change.apply(model, setting) for change in changes}
    return {name: undo for name, undo in made.items() if undo is not None}


def _undo(made: Mapping[str, Undo]) -> None:
    for undo in reversed(list(made.values())):
        undo()


def _agreed(value: Any, setting: Setting) -> Any:
    """Returns `value`; on all ranks of a tensor-parallel model, that of rank 0, since rounding may differ by rank."""
    return _broadcast(value) if setting.shares_model else value


def _broadcast(value: Any) -> Any:
    values = [value]
    with ranks.waiting():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
