"""The outcome of a self-test: which ways of running the model are right, and the fastest of them, which are used."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from sbeval.errors import UserError
from sbeval.model_adapters.batching import BatchLimits

Way = Literal["together", "equal lengths", "alone", "without a cache", "refused"]
TOGETHER: Way = "together"
EQUAL_LENGTHS: Way = "equal lengths"
ALONE: Way = "alone"
WITHOUT_CACHE: Way = "without a cache"
REFUSED: Way = "refused"

Ways = tuple[tuple[str, Way], ...]
"""Pairs of a check's name and the way of running that is allowed if this check passes, the fastest way first."""

AGAIN = "the same text read again"
LATER_TOKENS = "earlier tokens do not see later ones"
ATTENTION = "attention in force is eager attention"
ROWS = "rows of a batch"
RIGHT_PADDING = "padding on the right"
SEVERAL = "several tokens after a cache"
LENGTH = "the cache's length"
LEFT_PADDING = "generated with padding on the left"
ROWS_GENERATED = "generated, rows of a batch"
ONE = "generated, one token after a cache"
UNCACHED = "generated without a cache"
REAL_ROWS = "rows of the run's own batches"
REAL_ENDS = "the run's own texts with another end"
REAL_PREFIXES = "the run's own texts after a shared beginning"
STILL = "the test's text before and after the run's own"
REAL_ANSWERS = "answers of the run's own batches"
SLOTS = "the run's own answers, in slots"

SCORING: Ways = ((RIGHT_PADDING, TOGETHER), (ROWS, EQUAL_LENGTHS), (LATER_TOKENS, ALONE))
GENERATION: Ways = (
    (LEFT_PADDING, TOGETHER),
    (ROWS_GENERATED, EQUAL_LENGTHS),
    (ONE, ALONE),
    (UNCACHED, WITHOUT_CACHE),
)
_DONE = {
    EQUAL_LENGTHS: "only texts of equal length are {} together",
    ALONE: "texts are {} one by one",
    WITHOUT_CACHE: "texts are {} one by one and read anew for each token, which may take a hundred times as long",
    REFUSED: "no text can be {}",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of comparing one way of running the model with whole texts in batches of one, without a cache.

    Attributes:
        passed: whether rounding explains the difference.
        difference: the relative difference of the logits (see `measured`), or a number in the unit that `reason` begins
            with, such as nats. None if the model does not run in this way or there is nothing to compare.
        reason: why `difference` is None; for batches of the evaluation, how many rows and tokens were compared.
    """

    passed: bool
    difference: float | None = None
    reason: str | None = None

    def __str__(self) -> str:
        difference = None if self.difference is None else f"{self.difference:.2g}"
        return " ".join(text for text in (difference, self.reason) if text is not None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a self-test, and the ways of running the model that it allows.

    Attributes:
        model: the name of the model's class.
        rounding: the largest difference that rounding explains for this model; None if nothing was tested.
        checks: the results, by the name of the check.
        scoring: the way in which texts are scored, such as one at a time.
        generation: the way in which transformers' `generate` is called. Generation in slots, this project's own decode
            loop, is tested separately.
        prefixes: whether a prefix that several texts share may be read once, with its KV cache used for all of them.
        attention: the attention implementation that replaces the model's own, None if that stays.
        untested: why nothing was tested, None if the model was tested.
    """

    model: str
    rounding: float | None = None
    checks: Mapping[str, Check] = dataclasses.field(default_factory=dict)
    scoring: Way = TOGETHER
    generation: Way = TOGETHER
    prefixes: bool = True
    attention: str | None = None
    untested: str | None = None

    @property
    def failed(self) -> dict[str, Check]:
        """The checks that failed, by name."""
        return {name: check for name, check in self.checks.items() if not check.passed}

    def ways(self) -> str | None:
        """Describes the restrictions that failed checks put on the run; None if there are none."""
        usual = type(self)(model="")
        names = ("scoring", "generation", "prefixes", "attention")
        changed = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != getattr(usual, name)]
        return ", ".join(changed) or None

    def __str__(self) -> str:
        if self.untested is not None:
            return f"{self.model or 'the model'} was not tested: {self.untested}"
        if not self.failed:
            return f"{self.model} has the logits of whole texts in all {len(self.checks)} ways tested"
        failures = ", ".join(f"{name}: {check}" for name, check in self.failed.items())
        rounding = f"rounding explains {self.rounding:.1g} of their spread"
        return f"{self.model} has other logits than for whole texts ({failures}; {rounding}), so {self._done()}"

    def _done(self) -> str:
        done = [f"{self.attention} attention is used"] if self.attention else []
        done += ["no text is generated in slots"] if SLOTS in self.failed and self.generation != REFUSED else []
        ways = {"scored": self.scoring, "generated by transformers' own loop": self.generation}
        done += [_DONE[way].format(what) for what, way in ways.items() if way in _DONE]
        if not self.prefixes and self.scoring != REFUSED:
            done.append("prefixes that texts share are read again for each text")
        return ", ".join(done) or "no other way is used"

    def table(self) -> list[str]:
        """Returns the lines of the table of checks that `sbeval inspect` prints."""
        if self.untested is not None:
            return [f"Self-test: {self}."]
        rows = [(name, "passed" if check.passed else "FAILED", str(check)) for name, check in self.checks.items()]
        return [
            f"Self-test: how logits differ from those of whole texts, where rounding explains {self.rounding:.1g}",
            *(f"  {name:<40}{result:<8}{text}" for name, result, text in rows),
            f"So {self._done()}.",
        ]

    def check(self, what: Literal["scoring", "generation"]) -> None:
        """Checks that at least one way to score, or to generate, passed the self-test.

        Raises:
            UserError: every way has failed.
        """
        if getattr(self, what) == REFUSED:
            raise UserError(
                f"No tested way of {what} gives this model's logits for whole texts: {self}. Use another version of "
                "transformers or another attn_implementation, or pass self_test=false in --model_args to run it all "
                "the same."
            )

    @staticmethod
    def limits(limits: BatchLimits, way: Way) -> BatchLimits:
        """Returns `limits`, tightened so that batches run in this way, such as with rows of equal length only."""
        rows = limits.max_rows if way in (TOGETHER, EQUAL_LENGTHS) else 1
        return dataclasses.replace(limits, max_rows=rows, same_length=limits.same_length or way != TOGETHER)

    def to_json(self) -> dict[str, Any]:
        """Returns the outcome as JSON values, its log sentence, and `sound`: whether every check passed."""
        return {**dataclasses.asdict(self), "sound": self.untested is None and not self.failed, "sentence": str(self)}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Self:
        """Reads the value that `to_json` returned.

        Raises:
            KeyError, TypeError: the value has other fields, for example because another version wrote it.
        """
        fields = {field.name: kept[field.name] for field in dataclasses.fields(cls)}
        if not {fields["scoring"], fields["generation"]} <= {TOGETHER, REFUSED, *_DONE}:
            raise KeyError(fields["scoring"], fields["generation"])
        return cls(**{**fields, "checks": {name: Check(**check) for name, check in kept["checks"].items()}})


NOT_NEEDED = Outcome(model="", untested="it is of this project's own family")


def fastest(ways: Ways, checks: Mapping[str, Check]) -> Way:
    """Returns the fastest way whose check has passed, `REFUSED` if none has."""
    return next((way for name, way in ways if name in checks and checks[name].passed), REFUSED)
