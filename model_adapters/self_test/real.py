"""Checks batches of the evaluation itself: some rows are computed again in a batch of one before the results are used.

The self-test's text is short, and its batches are small. So the first batch of each length of text, and each batch with
more rows than any batch before it, is checked:

- Rows of the batch: the first, the last and two between them, at every scored position, must have the scores that they
  have in a batch of one. Only the last row is checked if an earlier batch with more than half as many rows had four
  rows checked.
- The short texts of the self-test, in a batch with as many rows, must have those scores, too. This check is repeated
  if a batch has more rows than all batches before.
- The longest text is read with another last token, and with another second half: scores of earlier tokens must stay.
- The self-test's text is read before the first request and after the last: its scores must stay, so that no request
  changes the state of the model.
- Each token of an answer must be the most probable one when the model reads the whole text without a cache.

Two lengths count as equal if they have the same number of binary digits. Differences of scores are in nats. Their limit
is how far the scores of the same text move when random rounding errors are added to module outputs (see `measured`).

Shape suffixes: L tokens, N scored positions, V vocabulary.
"""

import contextlib
import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sbeval.model_adapters.batching import BatchLimits, fitting, free_memory, out_of_memory
from sbeval.model_adapters.self_test import outcome as names
from sbeval.model_adapters.self_test.measured import (
    MOST_DRAWS,
    ROWS,
    TIMES_LARGEST,
    TIMES_ROUNDING,
    TOKENS,
    Apart,
)
from sbeval.model_adapters.self_test.outcome import NOT_NEEDED, Check, Outcome
from sbeval.scoring.body import no_cache
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.requests import TargetSequence
from sbeval.scoring.rounding import least, rounded_anew

# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
logger = logging.getLogger("lm_eval.sbeval.self_test")

Scores = NDArray[np.float32]
Score = Callable[[Sequence[TargetSequence]], list[Scores]]
"""Scores texts in one batch, padded on the right, and returns the log-probabilities [N] in nats of each."""
Kind = Literal["one length", "padded", "after a prefix"]
"""The kind of a batch: rows of one length, padded rows, or rows that continue from the KV cache of a shared prefix."""
Written = tuple[NDArray[np.int64], Sequence[int]]
"""The tokens of a prompt and the tokens of its answer."""

_FEWEST_COMPARED = 16
_SHARE_OF_MEAN = 0.25
_MOST_DOUBTFUL = 4
_FIRST_ANSWERS = 4
_OF_SPREAD = "of the logits' spread"
_NO_ROOM = (
    "Expected memory beside the model for reading a short text, but it ran out: free some, or use dtype=bfloat16."
)


class RealBatches:
    """The outcome of a model's self-test, updated by checks of the batches of the evaluation itself.

    Args:
        opened: the loaded model, None if no batch is checked.
        text: token ids of the self-test's text; None if no batch is checked.

    Attributes:
        outcome: the ways of running the model that are allowed; fewer after a batch has failed its check.
    """

    def __init__(self, outcome: Outcome = NOT_NEEDED, opened: Any = None, text: Sequence[int] | None = None) -> None:
        self.outcome = outcome
        self._opened, self._text = opened, text
        self._rows: dict[tuple[str, int], int] = {}
        self._rows_when_four_checked: dict[tuple[str, int], int] = {}
        self._lengths: set[int] = set()
        self._short_rows = {False: ROWS, True: ROWS}
        self._before: Scores | None = None
        self._allowed: dict[int, tuple[Apart, int]] = {}
        self._most: dict[str, tuple[float, int, int]] = {}
        self._answers: dict[int, int] = {}

    def limits(self, limits: BatchLimits, what: Literal["scoring", "generation"]) -> BatchLimits:
        """Returns `limits`, tightened to the way of scoring or generation that the outcome allows at present."""
        return Outcome.limits(limits, getattr(self.outcome, what))

    def begin(self, score: Score) -> None:
        """Reads the self-test's text before the run's first text.

        Raises:
            DoesNotFit: memory does not suffice for this text.
        """
        if self._text is not None and self._before is None:
            # a model that masks some tokens gives them infinite scores; then this check is left out
            with contextlib.suppress(NonFiniteError), fitting(_NO_ROOM):
                (self._before,) = score([self._test_text()])

    def end(self, score: Score) -> None:
        """Reads the self-test's text once more, after the run's texts.

        Raises:
            UserError: the scores of the text have changed, so requests have changed the state of the model.
        """
        if self._before is None:
            return
        text = self._test_text()
        difference = _apart(score([text])[0], self._before)
        if not self._explained(difference, text, score):
            self._refuse(names.STILL, difference, "between two times")

    def needs_check(self, kind: Kind, rows: int, length: int) -> bool:
        """Whether a batch with this number of rows and this length of its longest text, in tokens, must be checked."""
        return self._text is not None and rows > self._rows.get((kind, length.bit_length()), 0)

    def stand(self, kind: Kind, batch: Sequence[TargetSequence], scores: Sequence[Scores], score: Score) -> bool:
        """Whether the scores of some rows of a batch are right. If not, `outcome` no longer allows such batches.

        Args:
            kind: how the batch was scored.
            batch: the texts of the batch with their prefixes, the longest first.
            scores: the scores of each text, computed in this batch.
            score: a function that scores texts in one batch, without the KV cache of a shared prefix.

        Raises:
            UserError: every way to score texts with this model has failed.
        """
        length = len(batch[0].inputs_L)
        key = (kind, length.bit_length())
        rows = self._to_check(key, len(batch))
        try:
            wrong = self._wrong_rows(kind, batch, scores, rows, score) or self._wrong_short_rows(
                kind, len(batch), score
            )
            if wrong is None and length.bit_length() not in self._lengths:
                alone = scores[0] if len(batch) == 1 and kind != "after a prefix" else score([batch[0]])[0]
                self._check_end(batch[0], alone, score)
                self.end(score)
                self._lengths.add(length.bit_length())
        except Exception as error:  # the code of a model can raise anything
            if not out_of_memory(error):
                raise
            free_memory()  # the batch fitted into memory, but its check does not
            wrong = None
        self._rows[key] = len(batch)
        if wrong is None:
            return True
        if kind == "after a prefix":
            self._narrow(names.REAL_PREFIXES, wrong, prefixes=False)
        else:
            way = names.EQUAL_LENGTHS if kind == "padded" else names.ALONE
            self._narrow(names.REAL_ROWS, wrong, scoring=way)
        return False

    def _wrong_rows(
        self,
        kind: Kind,
        batch: Sequence[TargetSequence],
        scores: Sequence[Scores],
        rows: Iterable[int],
        score: Score,
    ) -> Check | None:
        """Compares rows of a batch with the same texts in batches of one; returns a failed check, None if all agree."""
        if len(batch) == 1 and kind != "after a prefix":
            return None
        name = names.REAL_PREFIXES if kind == "after a prefix" else names.REAL_ROWS
        length = len(batch[0].inputs_L)
        for row in rows:
            difference = _apart(scores[row], score([batch[row]])[0])
            if not self._explained(difference, batch[row], score):
                return _nats(difference, f"in a batch of {len(batch)} rows of up to {length} tokens")
            self._note(name, difference, len(batch), length)
        return None

    def _wrong_short_rows(self, kind: Kind, rows: int, score: Score) -> Check | None:
        """Checks a batch of the self-test's short texts with at least `rows` rows; returns a failed check or None."""
        padded = kind == "padded"
        if rows <= self._short_rows[padded] or self._before is None:
            return None
        self._short_rows[padded] = rows = 1 << (rows - 1).bit_length()
        text = _cut(self._test_text(), TOKENS // 2)
        length = len(text.inputs_L)
        texts = [text, _with_end(text, length // 2), *([_cut(text, length // 2), _cut(text, length - 1)] * padded)]
        alone = [score([each])[0] for each in texts]
        found = score([texts[row % len(texts)] for row in range(rows)])
        difference = max((_apart(each, alone[row % len(texts)]) for row, each in enumerate(found)), key=_largest)
        explained = self._explained(difference, text, score)
        return None if explained else _nats(difference, f"in a batch of {rows} rows of the test's texts")

    def _check_end(self, text: TargetSequence, expected: Scores, score: Score) -> None:
        """Checks that the scores of a text do not depend on later tokens.

        The text is read twice in a batch of one: with another last token, and with another second half. Both passes
        must give the same scores in the first half. With another last token, the scores of the positions that the
        request asks for must also equal `expected`, except at the last position.

        Raises:
            UserError: scores depend on later tokens.
        """
        length = len(text.inputs_L)
        if length < 2:
            return
        middle, whole = min(length // 2 | 1, length - 1), _whole(text)
        both = TargetSequence(text.inputs_L, *(np.concatenate(pair) for pair in zip(whole[1:], text[1:], strict=True)))
        try:
            other_last, other_half = (score([_with_end(both, before)])[0] for before in (length - 1, middle))
        except NonFiniteError:  # the request does not ask for these scores, so they may be NaN or infinite
            return
        early = text.positions_T < length - 1
        difference = _apart(other_half[:middle], other_last[:middle])
        difference = difference.or_more(_apart(other_last[len(whole.targets_T) :][early], expected[early]))
        if self._explained(difference, text, score):
            self._note(names.REAL_ENDS, difference, 1, length)
        else:
            self._refuse(names.REAL_ENDS, difference, f"in a text of {length} tokens")

    def _test_text(self) -> TargetSequence:
        tokens = np.asarray(self._text, dtype=np.int64)
        return TargetSequence(tokens[:-1], np.arange(len(tokens) - 1), tokens[1:])

    def _explained(self, difference: Apart, text: TargetSequence, score: Score) -> bool:
        """Whether a difference is within the limit; before it says no, it draws errors until there are `MOST_DRAWS`."""
        length = len(text.inputs_L).bit_length()
        floor = Apart(_SHARE_OF_MEAN * self._least, TIMES_LARGEST * self._least)
        allowed, draws = self._allowed.get(length, (floor, 0))
        if difference.within(allowed) or not math.isfinite(difference.largest):
            return difference.within(allowed)
        text = _whole(text)
        with contextlib.suppress(NonFiniteError):  # the request does not ask for these scores, so they may be NaN
            (expected,) = score([text])
            while not difference.within(allowed) and draws < MOST_DRAWS:
                with rounded_anew(self._opened.model, seed=draws, times=TIMES_ROUNDING):
                    moved = _apart(score([text])[0], expected)
                allowed = allowed.or_more(Apart(moved.mean, TIMES_LARGEST * moved.largest))
                draws += 1
        self._allowed[length] = allowed, draws
        return difference.within(allowed)

    @property
    def _least(self) -> float:
        return least(self._opened.mixed_precision_dtype or self._opened.model.dtype, self._opened.device)

    def needs_answer_check(self, *, rows: int, length: int, padded: bool) -> bool:
        """Whether answers that transformers' `generate` wrote in one batch must be checked."""
        if self._text is None or self.outcome.generation in (names.WITHOUT_CACHE, names.REFUSED):
            return False  # without a cache, generation reads the whole text for each token, as the check itself does
        return rows > self._rows.get((_generated(padded), length.bit_length()), 0)

    def answers_stand(
        self, batch: Sequence[Written], *, length: int, not_early: Sequence[int] = (), fewest: int = 0
    ) -> bool:
        """Whether some greedy answers of a batch are right. If not, `outcome` no longer allows such batches.

        Args:
            batch: prompts with their answers.
            length: the largest number of tokens of a prompt with its answer.
            not_early: tokens that no answer may have among its first `fewest` tokens.
            fewest: the least number of new tokens.
        """
        rows, padded = len(batch), len({len(prompt) for prompt, _ in batch}) > 1
        key = (_generated(padded), length.bit_length())
        picked = self._to_check(key, rows)
        self._rows[key] = rows
        doubt = max((self._doubt(*batch[row], not_early, fewest) for row in picked), default=0.0)
        if doubt == 0:
            self._note(names.REAL_ANSWERS, None, rows, length)
            return True
        way = names.EQUAL_LENGTHS if padded else names.ALONE if rows > 1 else names.WITHOUT_CACHE
        reason = f"{_OF_SPREAD} in a batch of {rows} rows of up to {length} tokens"
        self._narrow(names.REAL_ANSWERS, Check(passed=False, difference=doubt, reason=reason), generation=way)
        return False

    def needs_slot_check(self, length: int) -> bool:
        """Whether the next answer generated in slots (our decode loop) must be checked; `length` is in tokens.

        For each power of two of the length, the first four answers are checked, and then the 8th, 16th, 32nd and so on.
        """
        if self._text is None:
            return False
        number = self._answers[length.bit_length()] = self._answers.get(length.bit_length(), 0) + 1
        return number <= _FIRST_ANSWERS or number & (number - 1) == 0

    def slot_stands(self, written: Written, *, not_early: Sequence[int] = (), fewest: int = 0) -> bool:
        """Whether an answer that was generated in slots is right. If not, `outcome` records the failed check."""
        doubt, length = self._doubt(*written, not_early, fewest), len(written[0]) + len(written[1])
        if doubt == 0:
            self._note(names.SLOTS, None, 1, length)
            return True
        reason = f"{_OF_SPREAD} in a text of {length} tokens"
        self._narrow(names.SLOTS, Check(passed=False, difference=doubt, reason=reason))
        return False

    def refuse_slots(self) -> None:
        """Ends the run after a wrong answer from slots, because earlier answers were returned without a check.

        Raises:
            UserError: always.
        """
        self._narrow(names.SLOTS, self.outcome.checks[names.SLOTS], generation=names.REFUSED)
        self.outcome.check("generation")

    def _doubt(self, prompt: NDArray[np.int64], answer: Sequence[int], not_early: Sequence[int], fewest: int) -> float:
        """Returns how far the logit of an answer's token is below the largest logit, 0 if rounding explains it.

        The unit is the standard deviation of the position's logits.
        """
        mixed, model = self._opened.mixed_precision_dtype, self._opened.model
        device = self._opened.device
        tokens_L = torch.from_numpy(np.concatenate([prompt, np.asarray(answer, dtype=np.int64)])).to(device)

        def below(stop: int, count: int) -> Tensor:
            """Returns how far the logits of the `count` tokens before `stop` are below the largest, float64 [N]."""
            logits_NV = _last_logits(model, tokens_L[None, : stop - 1], count).double()
            numbers_NV = torch.where(logits_NV.isfinite(), logits_NV, logits_NV.mean(-1, keepdim=True).nan_to_num())
            spread_N = numbers_NV.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
            early = max(0, min(count, len(prompt) + fewest - (stop - count)))
            logits_NV[:early, [*not_early]] = -torch.inf
            chosen_N1 = tokens_L[stop - count : stop, None].to(logits_NV.device)
            return ((logits_NV.amax(-1) - logits_NV.gather(1, chosen_N1)[:, 0]) / spread_N).nan_to_num(posinf=math.inf)

        try:
            with torch.no_grad(), torch.autocast(device.type, dtype=mixed, enabled=mixed is not None):
                below_N = below(len(tokens_L), len(answer)) if len(answer) else torch.zeros(0)
                for place in below_N.argsort(descending=True)[:_MOST_DOUBTFUL].tolist():
                    if below_N[place] <= self._least:
                        break
                    stop = len(prompt) + place + 1  # reads the text up to here, since the model may see later tokens
                    share, allowed = float(below(stop, 1)), self._least
                    for seed in range(MOST_DRAWS):
                        if share <= allowed:
                            break
                        with rounded_anew(model, seed=seed, times=TIMES_ROUNDING):
                            allowed = max(allowed, TIMES_LARGEST * abs(float(below(stop, 1)) - share))
                    if share > allowed:
                        return share
        except Exception as error:  # the code of a model can raise anything
            if not out_of_memory(error):
                raise
            free_memory()
        return 0.0

    def _to_check(self, key: tuple[str, int], rows: int) -> list[int]:
        """Returns the indices of the rows to check in a batch with more rows than any before it of its kind and length.

        Four rows are checked if the batch has at least twice the rows of the last batch with four checked rows.
        Otherwise the last row is checked.
        """
        if rows < 2 * self._rows_when_four_checked.get(key, 0):
            return [rows - 1]
        self._rows_when_four_checked[key] = rows
        return sorted({0, rows // 3, (2 * rows) // 3, rows - 1})

    def _note(self, name: str, difference: Apart | None, rows: int, length: int) -> None:
        """Records in the outcome the most rows, the longest text and the largest difference of passed checks."""
        if name in self.outcome.failed:
            return
        largest, most_rows, longest = self._most.get(name, (0.0, 0, 0))
        largest = max(largest, difference.largest) if difference else largest
        self._most[name] = largest, most_rows, longest = largest, max(most_rows, rows), max(longest, length)
        reach = f"in up to {most_rows} rows of up to {longest} tokens"
        check = (
            Check(passed=True, reason=reach) if difference is None else _nats(Apart(0.0, largest), reach, passed=True)
        )
        self.outcome = dataclasses.replace(self.outcome, checks={**self.outcome.checks, name: check})

    def _narrow(self, name: str, check: Check, **allowed: Any) -> None:
        self.outcome = dataclasses.replace(self.outcome, checks={**self.outcome.checks, name: check}, **allowed)
        logger.warning("self-test: %s", self.outcome)

    def _refuse(self, name: str, difference: Apart, where: str) -> None:
        self._narrow(name, _nats(difference, where), scoring=names.REFUSED)
        self.outcome.check("scoring")


def _whole(text: TargetSequence) -> TargetSequence:
    """Returns the same inputs, with every token after the first one as a target."""
    length = len(text.inputs_L)
    last = text.targets_T[text.positions_T == length - 1][:1]
    targets = np.concatenate([text.inputs_L[1:], last])
    return TargetSequence(text.inputs_L, np.arange(len(targets)), targets)


def _with_end(text: TargetSequence, before: int) -> TargetSequence:
    """Returns a text whose inputs from position `before` on are replaced by a copy of its beginning.

    If the first replaced input would stay the same, it becomes another token of the text.
    """
    inputs = text.inputs_L.copy()
    tail = len(inputs) - before
    replacement = np.resize(text.inputs_L[:before], tail)
    same = replacement == inputs[before:]
    different = text.inputs_L[text.inputs_L != inputs[before]] if same[:1].any() else []
    if len(different):
        replacement[0] = different[0]
    inputs[before:] = replacement
    return text._replace(inputs_L=inputs)


def _cut(text: TargetSequence, length: int) -> TargetSequence:
    """Returns the first `length` inputs, positions and targets of a text in which every token is a target."""
    return TargetSequence(*(each[:length] for each in text))


def _apart(found: Scores, expected: Scores) -> Apart:
    """Returns the mean and the maximum of differences in nats.

    A difference is infinite if only one of two scores is NaN. For fewer than `_FEWEST_COMPARED` scores the mean is 0.
    """
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        nats = np.where(same, 0.0, np.abs(found.astype(np.float64) - expected.astype(np.float64)))
    nats = np.nan_to_num(nats, nan=np.inf, posinf=np.inf)
    mean = float(nats.mean()) if len(nats) >= _FEWEST_COMPARED else 0.0
    return Apart(mean, float(nats.max(initial=0.0)))


def _largest(difference: Apart) -> float:
    return difference.largest


def _nats(difference: Apart, where: str, *, passed: bool = False) -> Check:
    return Check(passed=passed, difference=difference.largest, reason=f"nats {where}")


def _generated(padded: bool) -> str:
    return "generated, padded" if padded else "generated"


def _last_logits(model: Any, tokens_1L: Tensor, count: int) -> Tensor:
    """Returns the logits [N, V] at the last `count` tokens of one text, from a forward pass without a cache."""
    keep = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits_NV: Tensor = model(input_ids=tokens_1L, **no_cache(model), **keep).logits[0, -count:]
    return logits_NV
