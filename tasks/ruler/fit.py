"""Filling a prompt to its token budget.

Estimate by adding up piece counts, check one sample in `CHECKED_EVERY` whole, and, where sums are not exact for a
tokenizer, count every prompt of that block of samples whole and adjust.
"""

import dataclasses
from collections.abc import Mapping

from sbeval.tasks.ruler.drafts import Draft
from sbeval.tasks.ruler.tokens import TokenCounter

from sbeval.errors import UserError

CHECKED_EVERY = 50


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What stands around a prompt: system text and chat template, or only the space before the answer prefix.

    Attributes:
        head: before the prompt.
        middle: between the question and the answer prefix.
        tail: after the answer prefix.
    """

    head: str = ""
    middle: str = " "
    tail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """One prompt at one length.

    Attributes:
        prompt: everything the model is given, answer prefix included.
        units: haystack units in it.
        prompt_tokens: its tokens, BOS included.
        depths_tokens: tokens before each piece the question is about.
        depths_percent: their depths in the haystack, in percent.
    """

    prompt: str
    units: int
    prompt_tokens: int
    depths_tokens: list[int]
    depths_percent: list[float]


def prompt_text(draft: Draft, units: int, frame: Frame) -> str:
    """Returns the whole prompt."""
    return "".join(
        [frame.head, *draft.opening, draft.body(units), draft.closing, frame.middle, draft.answer_prefix, frame.tail]
    )


class _Sizes:
    """Token counts of what surrounds the bodies of some drafts."""

    def __init__(self, drafts: Mapping[int, Draft], frame: Frame, counter: TokenCounter) -> None:
        starts = {index: frame.head + (draft.opening[0] if draft.opening else "") for index, draft in drafts.items()}
        distinct = list(dict.fromkeys(starts.values()))
        start_tokens = dict(zip(distinct, counter.count(distinct).tolist(), strict=True))
        ends = [draft.closing + frame.middle + draft.answer_prefix + frame.tail for draft in drafts.values()]
        pieces = [piece for draft in drafts.values() for piece in draft.opening[1:]]
        piece_tokens = dict(zip(pieces, counter.count_pieces(pieces).tolist(), strict=True))
        self.before: dict[int, int] = {}
        self.around: dict[int, int] = {}
        for (index, draft), end_tokens in zip(drafts.items(), counter.count_pieces(ends).tolist(), strict=True):
            opening = sum(piece_tokens[piece] for piece in draft.opening[1:])
            self.before[index] = start_tokens[starts[index]] + opening
            self.around[index] = self.before[index] + end_tokens


def minimum_length(drafts: Mapping[int, Draft], *, frame: Frame, generated_tokens: int, counter: TokenCounter) -> int:
    """Returns the shortest context length, in tokens, at which every draft has the units its task is defined for."""
    prompts = [prompt_text(draft, draft.least_units, frame) for draft in drafts.values()]
    return int(counter.count(prompts).max()) + generated_tokens


def fit(
    drafts: Mapping[int, Draft],
    *,
    context_length: int,
    generated_tokens: int,
    frame: Frame,
    counter: TokenCounter,
    task: str,
) -> dict[int, Fitted]:
    """Fits samples to a context length.

    Args:
        drafts: samples by index.
        context_length: prompt plus generated tokens, never exceeded.
        generated_tokens: tokens kept free for the answer.
        frame: what stands around the prompts.
        counter: the model's tokenizer.
        task: named in errors.

    Returns:
        The fitted prompts by index, filled to within one unit.

    Raises:
        UserError: the length is below the task's minimum, or the task has too little text for it.
    """
    budget = context_length - generated_tokens
    sizes = _Sizes(drafts, frame, counter)
    units = {i: _clip(draft, draft.units_within(budget - sizes.around[i])) for i, draft in drafts.items()}
    estimates = {i: sizes.around[i] + draft.body_tokens(units[i]) for i, draft in drafts.items()}
    counted = _count_checked(drafts, units, frame, counter)
    exact = {i // CHECKED_EVERY for i, tokens in counted.items() if tokens != estimates[i]}
    for i in units.keys() - {i for i in units if i // CHECKED_EVERY not in exact}:
        units[i], estimates[i] = _fit_whole(drafts[i], units[i], budget, frame, counter)
    _refuse_too_short(drafts, estimates, budget, context_length, frame, generated_tokens, counter, task)
    fitted: dict[int, Fitted] = {}
    for i, draft in drafts.items():
        tokens, percents = draft.depths(units[i])
        fitted[i] = Fitted(
            prompt=prompt_text(draft, units[i], frame),
            units=units[i],
            prompt_tokens=estimates[i],
            depths_tokens=[sizes.before[i] + depth for depth in tokens],
            depths_percent=percents,
        )
    return fitted


def _clip(draft: Draft, units: int) -> int:
    most = units if draft.most_units is None else min(units, draft.most_units)
    return max(most, draft.least_units)


def _count_checked(
    drafts: Mapping[int, Draft], units: Mapping[int, int], frame: Frame, counter: TokenCounter
) -> dict[int, int]:
    """Counts the first sample of every block of `CHECKED_EVERY` whole."""
    first: dict[int, int] = {}
    for index in sorted(drafts):
        first.setdefault(index // CHECKED_EVERY, index)
    checked = list(first.values())
    counts = counter.count([prompt_text(drafts[i], units[i], frame) for i in checked])
    return dict(zip(checked, counts.tolist(), strict=True))


def _fit_whole(draft: Draft, units: int, budget: int, frame: Frame, counter: TokenCounter) -> tuple[int, int]:
    """Fits one sample by counting it whole: returns units and prompt tokens."""

    def count(n: int) -> int:
        return int(counter.count([prompt_text(draft, n, frame)])[0])

    low, low_tokens = draft.least_units, count(draft.least_units)
    high = draft.most_units + 1 if draft.most_units is not None else None
    while high is None or high - low > 1:
        units = max(units, low + 1) if high is None else min(max(units, low + 1), high - 1)
        tokens = count(units)
        per_unit = max(1.0, (tokens - low_tokens) / max(1, units - low))
        if tokens <= budget:
            low, low_tokens = units, tokens
            units += max(1, int((budget - tokens) / per_unit))
        else:
            high = units
            units -= max(1, round((tokens - budget) / per_unit))
    return low, low_tokens


def _refuse_too_short(
    drafts: Mapping[int, Draft],
    tokens: Mapping[int, int],
    budget: int,
    context_length: int,
    frame: Frame,
    generated_tokens: int,
    counter: TokenCounter,
    task: str,
) -> None:
    if all(count <= budget for count in tokens.values()):
        return
    least = minimum_length(drafts, frame=frame, generated_tokens=generated_tokens, counter=counter)
    raise UserError(
        f"{task} needs at least {least} tokens of context with this tokenizer, and was asked for {context_length}; "
        f"leave that length out of context_lengths."
    )
