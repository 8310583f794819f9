"""Filling a prompt to its token budget; the sizes of one task's samples at each length are cached on disk.

Estimate by adding up piece counts, check one sample in `CHECKED_EVERY` whole, and, where sums are not exact for a
tokenizer, count every prompt of that block of samples whole and adjust.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder, keep_table, read_table
from sbeval.tasks.ruler.drafts import Draft, Frame, Generator, prompt_text
from sbeval.tasks.tokens import kept_counts

CHECKED_EVERY = 50


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSize:
    """How one sample fills one length.

    Attributes:
        units: haystack units.
        prompt_tokens: tokens of the whole prompt, BOS included.
        depths_tokens: tokens before each piece the question is about.
        depths_percent: their depths in the haystack, in percent.
    """

    index: int
    units: int
    prompt_tokens: int
    depths_tokens: list[int]
    depths_percent: list[float]


class PromptFiller(NamedTuple):
    """Fills the prompts of one task to one context length, without the cache on disk.

    Attributes:
        context_length: prompt plus generated tokens, never exceeded.
    """

    task: "SampleSizes"
    context_length: int
    frame: Frame

    @property
    def budget(self) -> int:
        """Tokens of a prompt."""
        return self.context_length - self.task.generator.generated_tokens

    def sizes(self, indices: Iterable[int]) -> dict[int, PromptSize]:
        """Returns the size of each sample by index, whatever other indices are given.

        Raises:
            UserError: the length is below the task's minimum.
        """
        sizes = self._full_sizes(list(indices))
        generator = self.task.generator
        steps = generator.steps(self.context_length) if generator.options.scripts is not None else None
        if steps is None:
            return sizes
        first = sizes.get(0) or self._full_sizes([0])[0]
        return {i: self._shortened(size, steps.within(size.units, first.units)) for i, size in sizes.items()}

    def _draft(self, index: int) -> Draft:
        return self.task.generator.draft(index, self.context_length)

    def _shortened(self, size: PromptSize, units: int) -> PromptSize:
        """Returns a sample with fewer units, counted whole, but never with fewer than its task needs."""
        draft = self._draft(size.index)
        if (units := max(units, draft.least_units)) == size.units:
            return size
        tokens = self._counted(draft, units)
        return self._size(size.index, draft, units, tokens, self._tokens_around({size.index: draft})[0][size.index])

    def _full_sizes(self, asked: Sequence[int]) -> dict[int, PromptSize]:
        checks = {i - i % CHECKED_EVERY for i in asked}
        drafts = {i: self._draft(i) for i in dict.fromkeys([*asked, *sorted(checks)])}
        self._count_together(drafts.values())
        before, around = self._tokens_around(drafts)
        units = {i: self._estimate(draft, around[i]) for i, draft in drafts.items()}
        tokens = {i: around[i] + draft.body_tokens(units[i]) for i, draft in drafts.items()}
        checked = sorted(checks)
        whole = self.task.generator.counter.count([prompt_text(drafts[i], units[i], self.frame) for i in checked])
        inexact = {i for i, count in zip(checked, whole.tolist(), strict=True) if count != tokens[i]}
        for i in asked:
            if i - i % CHECKED_EVERY in inexact:
                units[i], tokens[i] = self._search_units(drafts[i], units[i])
        if any(tokens[i] > self.budget for i in asked):
            raise UserError(needs_at_least(self.task.name, self.minimum_length(asked), [self.context_length]))
        return {i: self._size(i, drafts[i], units[i], tokens[i], before[i]) for i in asked}

    def minimum_length(self, indices: Iterable[int]) -> int:
        """Returns the least context length, in tokens, at which these samples have the units their task needs.

        It holds for lengths at which the task has the same shape as at this one.
        """
        drafts = [self._draft(i) for i in indices]
        prompts = [prompt_text(draft, draft.least_units, self.frame) for draft in drafts]
        return int(self.task.generator.counter.count(prompts).max()) + self.context_length - self.budget

    def _count_together(self, drafts: Iterable[Draft]) -> None:
        """Counts the pieces of many samples in a few batches; the counter remembers them."""
        together: dict[tuple[str, str], list[str]] = {}
        for draft in drafts:
            for between, pieces in draft.counted_pieces().items():
                together.setdefault(between, []).extend(pieces)
        for between, pieces in together.items():
            self.task.generator.counter.count_pieces(pieces, between)

    def _size(self, index: int, draft: Draft, units: int, tokens: int, before: int) -> PromptSize:
        body_tokens, percents = draft.depths(units)
        depths = [before + depth for depth in body_tokens]
        return PromptSize(index=index, units=units, prompt_tokens=tokens, depths_tokens=depths, depths_percent=percents)

    def _tokens_around(self, drafts: Mapping[int, Draft]) -> tuple[dict[int, int], dict[int, int]]:
        """Returns, by sample, the tokens before the body and those around it."""
        pieces = list(dict.fromkeys(piece for draft in drafts.values() for piece in draft.opening[1:]))
        piece_tokens = dict(zip(pieces, self.task.generator.counter.count_pieces(pieces).tolist(), strict=True))
        frame = self.frame
        after_opening, before_closing = next(iter(drafts.values())).body_ends()
        starts = [frame.head + draft.opening[0] for draft in drafts.values()]
        start_tokens = self.task.generator.counter.count_starts(starts, after_opening).tolist()
        before = {
            i: start + sum(piece_tokens[piece] for piece in draft.opening[1:])
            for (i, draft), start in zip(drafts.items(), start_tokens, strict=True)
        }
        ends = [frame.end(draft) for draft in drafts.values()]
        end_tokens = self.task.generator.counter.count_pieces(ends, (before_closing, "")).tolist()
        return before, {i: before[i] + end for i, end in zip(drafts, end_tokens, strict=True)}

    def _estimate(self, draft: Draft, around: int) -> int:
        units = draft.units_within(self.budget - around)
        if draft.most_units is not None:
            units = min(units, draft.most_units)
        return max(units, draft.least_units)

    def _counted(self, draft: Draft, units: int) -> int:
        return int(self.task.generator.counter.count([prompt_text(draft, units, self.frame)])[0])

    def _search_units(self, draft: Draft, units: int) -> tuple[int, int]:
        """Searches the most units of one sample by counting whole prompts; returns units and prompt tokens."""
        low = draft.least_units
        low_tokens = self._counted(draft, draft.least_units)
        high = draft.most_units + 1 if draft.most_units is not None else None
        while high is None or high - low > 1:
            units = max(units, low + 1) if high is None else min(max(units, low + 1), high - 1)
            tokens = self._counted(draft, units)
            per_unit = max(1.0, (tokens - low_tokens) / (units - low))
            if tokens <= self.budget:
                low, low_tokens = units, tokens
                units += max(1, int((self.budget - tokens) / per_unit))
            else:
                high = units
                units -= max(1, round((tokens - self.budget) / per_unit))
        return low, low_tokens


def needs_at_least(task: str, needed_tokens: int, asked: Iterable[int]) -> str:
    """Returns the sentence for a task for which all lengths asked for are too short."""
    return (
        f"{task} needs at least {needed_tokens} tokens of context with this tokenizer, and was asked for "
        f"{', '.join(map(str, asked))}; give it a longer length, for this task alone with --metadata "
        f'\'{{"{task}": {{"context_lengths": [{needed_tokens}]}}}}\', or leave the task out.'
    )


GENERATOR_VERSION = 3
_LIKE_ONE_ANOTHER = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleSizes:
    """Sizes of the samples of one task at any length and frame, cached on disk.

    Attributes:
        facts: everything a sample depends on beside its index, the tokenizer included; JSON values.
    """

    name: str
    generator: Generator
    facts: Mapping[str, Any]

    def at_length(self, indices: Sequence[int], length: int, frame: Frame) -> dict[int, PromptSize]:
        """Returns the size of each sample at a length, read from the cache where it is known.

        Raises:
            UserError: one of them does not fit.
        """
        path = cache_folder("ruler") / f"ruler1-fits-{self._digest(length, frame)[:32]}.arrow"
        table = read_table(path)
        kept = {} if table is None else {row["index"]: row for row in table.to_pylist()}
        if missing := [index for index in indices if index not in kept]:
            made = self.filler(length, frame).sizes(missing)
            kept |= {index: dataclasses.asdict(size) for index, size in made.items()}
            keep_table(path, pa.Table.from_pylist([kept[index] for index in sorted(kept)]))
        return {index: PromptSize(**kept[index]) for index in indices}

    def needed_tokens(self, samples: int, length: int, frame: Frame) -> int | None:
        """Returns the context that the first samples need where that is more than `length` tokens, else None.

        Samples differ in size, so all are counted where the first one alone needs a good part of the length.
        """
        filler = self.filler(length, frame)
        if length >= _LIKE_ONE_ANOTHER * filler.minimum_length([0]):
            return None
        digest = self._digest(length, frame, minimum_of=samples)
        (needed,) = kept_counts(digest, lambda: np.array([filler.minimum_length(range(samples))]))
        return int(needed) if needed > length else None

    def filler(self, length: int, frame: Frame) -> PromptFiller:
        """Returns the filler of prompts of a length."""
        return PromptFiller(self, length, frame)

    def _digest(self, length: int, frame: Frame, **more: int) -> str:
        facts = {
            **self.facts,
            **more,
            "generator": GENERATOR_VERSION,
            "task": self.name,
            "generated_tokens": self.generator.generated_tokens,
            "length": length,
            "frame": dataclasses.asdict(frame),
            "special_tokens": self.generator.counter.special_tokens,
            **({"dropped_tokens": dropped} if (dropped := self.generator.counter.dropped.suffix) else {}),
            "sources": {name: importlib.metadata.version(name) for name in ("lm-eval", "wonderwords")},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
