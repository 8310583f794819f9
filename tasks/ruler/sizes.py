"""Fills prompts to their token budget, and caches the sizes of a task's samples at each context length on disk.

A prompt's length is estimated by the sum of its segments' token counts. One sample in every block of `CHECKED_EVERY`
is also tokenised as a whole. If its count differs from the sum, the sums are not exact for this tokenizer, and every
prompt of that block is tokenised as a whole and adjusted.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder, keep_table, read_table
from sbeval.tasks.ruler.cut import CutDraft
from sbeval.tasks.ruler.drafts import Draft, Frame, Generator, prompt_text
from sbeval.tasks.ruler.options import TooLong
from sbeval.tasks.tokens import cached_counts

CHECKED_EVERY = 50
_COUNTED_TOGETHER = 64  # prompts, so that the longest texts need little memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSize:
    """The size of one sample at one context length.

    Attributes:
        index: index of the sample.
        units: number of haystack units (lines, words or documents of filler text).
        prompt_tokens: token count of the whole prompt, BOS included.
        depths_tokens: number of prompt tokens before each segment, such as a needle, that the question is about.
        depths_percent: depths of these segments in the haystack, in percent.
        cut_tokens: number of tokens of the sample's text that were removed, so that the prompt fits.
    """

    index: int
    units: int
    prompt_tokens: int
    depths_tokens: list[int]
    depths_percent: list[float]
    cut_tokens: int = 0


class PromptFiller(NamedTuple):
    """Chooses for each sample of one task how many haystack units fill one context length; uses no cache on disk.

    Attributes:
        task: generator of the task's samples.
        context_length: largest sum of prompt and generated tokens.
        frame: the text that system prompt and chat template put around the prompt.
    """

    task: "SampleSizes"
    context_length: int
    frame: Frame

    @property
    def budget(self) -> int:
        """Largest number of tokens in a prompt."""
        return self.context_length - self.task.generator.generated_tokens

    def sizes(self, indices: Iterable[int]) -> dict[int, PromptSize]:
        """Returns the size of each sample by index; a sample's size does not depend on the other indices.

        With `too_long` "leave_out", samples that do not fit are absent.

        Raises:
            UserError: the context length is below the task's minimum, or with `scripts` the first sample does not fit.
        """
        sizes = self._full_sizes(list(indices))
        generator = self.task.generator
        steps = generator.steps(self.context_length) if generator.options.scripts is not None else None
        if steps is None:
            return sizes
        first = sizes.get(0) or self._full_sizes([0]).get(0)
        if first is None or first.cut_tokens:
            raise UserError(
                f"{self.task.name}: with scripts={generator.options.scripts} the first sample sets the size of all "
                f"samples, and it does not fit {self.context_length} tokens: remove that length, or scripts."
            )
        return {
            i: size if size.cut_tokens else self._shortened(size, steps.within(size.units, first.units))
            for i, size in sizes.items()
        }

    def _draft(self, index: int) -> Draft:
        return self.task.generator.draft(index, self.context_length)

    def _shortened(self, size: PromptSize, units: int) -> PromptSize:
        """Returns the size of a sample with `units` units instead; tokenises the whole prompt.

        `units` is raised to the least number for which the task is defined.
        """
        draft = self._draft(size.index)
        if (units := max(units, draft.least_units)) == size.units:
            return size
        tokens = self._counted(draft, units)
        return self._size(size.index, draft, units, tokens, self._tokens_around({size.index: draft})[0][size.index])

    def _full_sizes(self, indices: Sequence[int]) -> dict[int, PromptSize]:
        """Returns, by index, the size of each sample with as many units as the token budget allows.

        A sample that does not fit with its fewest units is absent, cut or an error, as `too_long` says.
        """
        checks = {i - i % CHECKED_EVERY for i in indices}
        drafts = {i: self._draft(i) for i in dict.fromkeys([*indices, *sorted(checks)])}
        self._count_together(drafts.values())
        before, around = self._tokens_around(drafts)
        units = {i: self._estimate(draft, around[i]) for i, draft in drafts.items()}
        tokens = {i: around[i] + draft.body_tokens(units[i]) for i, draft in drafts.items()}
        checked = sorted(checks)
        whole = self.task.generator.counter.count([prompt_text(drafts[i], units[i], self.frame) for i in checked])
        inexact = {i for i, count in zip(checked, whole.tolist(), strict=True) if count != tokens[i]}
        for i in indices:
            if i - i % CHECKED_EVERY in inexact:
                units[i], tokens[i] = self._search_units(drafts[i], units[i])
        over = [i for i in indices if tokens[i] > self.budget]
        for i in over:  # a sum of counts may be too large where the whole prompt is not
            units[i], tokens[i] = self._search_units(drafts[i], units[i])
        sizes = {}
        for i in indices:
            if tokens[i] <= self.budget:
                sizes[i] = self._size(i, drafts[i], units[i], tokens[i], before[i])
            elif self.task.too_long == "truncate":
                sizes[i] = self._cut_size(i, drafts[i], tokens[i])
            elif self.task.too_long == "refuse":
                raise self._too_short(indices)
        return sizes

    def _too_short(self, indices: Iterable[int]) -> UserError:
        return UserError(needs_at_least(self.task.name, self.minimum_length(indices), [self.context_length]))

    def _cut_size(self, index: int, draft: Draft, tokens: int) -> PromptSize:
        """Returns the size of a sample without the middle of its text; `tokens` are those of the prompt with it."""
        cut = CutDraft.of_draft(draft, self.task.generator.counter)
        units, kept = self._search_units(cut, max(1, len(cut.starts) - (tokens - self.budget)))
        if kept > self.budget:
            raise self._too_short([index])
        return PromptSize(
            index=index,
            units=units,
            prompt_tokens=kept,
            depths_tokens=[],
            depths_percent=[],
            cut_tokens=cut.cut_tokens(units),
        )

    def minimum_length(self, indices: Iterable[int]) -> int:
        """Returns the smallest context length in tokens that each of these samples fits (`minimum_lengths`)."""
        return int(self.minimum_lengths(indices).max())

    def minimum_lengths(self, indices: Iterable[int]) -> NDArray[np.int64]:
        """Returns the context length in tokens that each sample needs, int64 [indices].

        A sample has its fewest units; if texts may be cut (`too_long` "truncate"), it has no text. The result is right
        only if the task's examples are as long at that context length as at this one: some tasks use shorter examples
        at short lengths.
        """
        counts = [self.task.generator.counter.count(prompts) for prompts in self._least_prompts(indices)]
        return np.concatenate(counts) + self.context_length - self.budget

    def _least_prompts(self, indices: Iterable[int]) -> Iterator[list[str]]:
        listed = list(indices)
        for start in range(0, len(listed), _COUNTED_TOGETHER):
            drafts = [self._draft(i) for i in listed[start : start + _COUNTED_TOGETHER]]
            if self.task.too_long == "truncate":
                yield ["".join([self.frame.head, *draft.opening, self.frame.end(draft)]) for draft in drafts]
            else:
                yield [prompt_text(draft, draft.least_units, self.frame) for draft in drafts]

    def _count_together(self, drafts: Iterable[Draft]) -> None:
        """Tokenises the segments of many samples in a few batches, so that the counter's cache holds their counts."""
        batches: dict[tuple[str, str], list[str]] = {}
        for draft in drafts:
            for between, segments in draft.counted_segments().items():
                batches.setdefault(between, []).extend(segments)
        for between, segments in batches.items():
            self.task.generator.counter.count_segments(segments, between)

    def _size(self, index: int, draft: Draft, units: int, tokens: int, before: int) -> PromptSize:
        body_tokens, percents = draft.depths(units)
        depths = [before + depth for depth in body_tokens]
        return PromptSize(
            index=index,
            units=units,
            prompt_tokens=tokens,
            depths_tokens=depths,
            depths_percent=percents,
            cut_tokens=draft.cut_tokens(units),
        )

    def _tokens_around(self, drafts: Mapping[int, Draft]) -> tuple[dict[int, int], dict[int, int]]:
        """Returns two mappings by sample: the number of tokens before the body, and the number before and after it."""
        segments = list(dict.fromkeys(segment for draft in drafts.values() for segment in draft.opening[1:]))
        segment_tokens = dict(zip(segments, self.task.generator.counter.count_segments(segments).tolist(), strict=True))
        frame = self.frame
        after_opening, before_closing = next(iter(drafts.values())).body_ends()
        starts = [frame.head + draft.opening[0] for draft in drafts.values()]
        start_tokens = self.task.generator.counter.count_starts(starts, after_opening).tolist()
        before = {
            i: start + sum(segment_tokens[segment] for segment in draft.opening[1:])
            for (i, draft), start in zip(drafts.items(), start_tokens, strict=True)
        }
        ends = [frame.end(draft) for draft in drafts.values()]
        end_tokens = self.task.generator.counter.count_segments(ends, (before_closing, "")).tolist()
        return before, {i: before[i] + end for i, end in zip(drafts, end_tokens, strict=True)}

    def _estimate(self, draft: Draft, around: int) -> int:
        units = draft.units_within(self.budget - around)
        if draft.most_units is not None:
            units = min(units, draft.most_units)
        return max(units, draft.least_units)

    def _counted(self, draft: Draft, units: int) -> int:
        return int(self.task.generator.counter.count([prompt_text(draft, units, self.frame)])[0])

    def _search_units(self, draft: Draft, units: int) -> tuple[int, int]:
        """Finds the largest number of units with which a sample fits the budget, by tokenising whole prompts.

        `units` is the first guess.

        Returns:
            The number of units, and the token count of the prompt.
        """
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


def needs_at_least(task: str, needed_tokens: int, lengths: Iterable[int]) -> str:
    """Returns the error message for a task for which all requested context lengths are too short."""
    return (
        f"{task} needs at least {needed_tokens} tokens of context with this tokenizer, but context_lengths are "
        f"{', '.join(map(str, lengths))}; set a longer length, for this task only with --metadata "
        f'\'{{"{task}": {{"context_lengths": [{needed_tokens}]}}}}\', or leave the task out.'
    )


GENERATOR_VERSION = 4
_LIKE_ONE_ANOTHER = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleSizes:
    """Sizes of one task's samples at any context length, cached on disk.

    The argument `frame` of the methods is the text that system prompt and chat template put around a prompt.

    Attributes:
        name: name of the task.
        generator: makes the samples.
        facts: everything except the index that a sample depends on, as JSON values, with the hash of the tokenizer; it
            becomes part of the cache key.
        too_long: what becomes of a sample that does not fit a length, as the option of RULER's tasks says.
    """

    name: str
    generator: Generator
    facts: Mapping[str, Any]
    too_long: TooLong = "refuse"

    def at_length(self, indices: Sequence[int], length: int, frame: Frame) -> dict[int, PromptSize]:
        """Returns the size of each sample at a context length by index; known sizes come from the cache.

        With `too_long` "leave_out", samples that do not fit are absent.

        Raises:
            UserError: a sample does not fit the length.
        """
        path = cache_folder("ruler") / f"ruler1-fits-{self._digest(length, frame)[:32]}.arrow"
        table = read_table(path)
        cached = {} if table is None else {row["index"]: row for row in table.to_pylist()}
        if missing := [index for index in indices if index not in cached]:
            new_sizes = self.filler(length, frame).sizes(missing)
            cached |= {index: dataclasses.asdict(size) for index, size in new_sizes.items()}
            keep_table(path, pa.Table.from_pylist([cached[index] for index in sorted(cached)]))
        return {index: PromptSize(**cached[index]) for index in indices if index in cached}

    def prompt(self, index: int, length: int, size: PromptSize, frame: Frame) -> str:
        """Returns the whole prompt of a sample at a context length."""
        draft = self.generator.draft(index, length)
        if size.cut_tokens and not isinstance(draft, CutDraft):
            draft = CutDraft.of_draft(draft, self.generator.counter)
        return prompt_text(draft, size.units, frame)

    def needed_tokens(self, samples: int, length: int, frame: Frame) -> NDArray[np.int64] | None:
        """Returns the context length that each of the first `samples` samples needs, int64 [samples]; None if all fit.

        If the first sample needs less than a quarter of `length`, the others are assumed to fit; otherwise the tokens
        of all are counted, because samples differ in size. They are always counted if samples are left out, or if their
        texts differ in length.
        """
        filler = self.filler(length, frame)
        alike = self.generator.alike or self.too_long == "truncate"
        if alike and self.too_long != "leave_out" and length >= _LIKE_ONE_ANOTHER * filler.minimum_length([0]):
            return None
        # texts that are not made to fill a length are the same at every length
        digest = self._digest(length if self.generator.alike else 0, frame, minimums_of=samples)
        return cached_counts(digest, lambda: filler.minimum_lengths(range(samples)))

    def filler(self, length: int, frame: Frame) -> PromptFiller:
        """Returns a filler of prompts for a context length."""
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
            **({} if self.too_long == "refuse" else {"too_long": self.too_long}),
            **({"dropped_tokens": dropped} if (dropped := self.generator.counter.dropped.suffix) else {}),
            "sources": {name: importlib.metadata.version(name) for name in ("lm-eval", "wonderwords")},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
