"""Windows of a text are lm-eval's, and none is lost where several are under way at once."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.model import CacheHook
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sbeval.errors import UserError
from sbeval.model_adapters.answers import Answers
from sbeval.model_adapters.batching import BatchLimits, DoesNotFit, SlotLimits, run_in_batches
from sbeval.model_adapters.prepare.prepared import Prepared
from sbeval.model_adapters.rope import RequestRope
from sbeval.model_adapters.score.schedule import score_windows
from sbeval.model_adapters.score.windows import rolling_windows, window_of
from sbeval.model_adapters.session import Meter, Session
from sbeval.scoring.scorer import PendingScores, TokenScorer


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 9), max_size=30), max_length=st.integers(1, 12))
def test_rolling_windows_are_those_of_lm_eval(tokens, max_length):
    cuts = get_rolling_token_windows(tokens, prefix_token=77, max_seq_len=max_length, context_len=1)
    expected = [((context + targets)[:-1], [targets]) for context, targets in map(make_disjoint_window, cuts)]
    found = rolling_windows(tokens, lead_in=77, max_length=max_length)
    loaded = [window.load() for window in found]
    assert [(x.inputs.tolist(), [run.tolist() for run in x.target_runs]) for x in loaded] == expected
    assert [window.length for window in found] == [len(inputs) for inputs, _ in expected]


class Killed(BaseException):
    pass


class Scorer(TokenScorer):
    """Gives each target minus its own number, and NaN for 66; dies when it is given 99, and fails at 98.

    The first wait for 77 is interrupted, and there is no memory to read 55. An answer to 44 cannot be kept. 88 fits
    where it is alone.
    """

    alone = False

    def __init__(self) -> None:
        super().__init__(torch.nn.Identity())
        self.chunks: list[int | None] = []
        self.started: list[int] = []
        self.reading: list[int] = []

    def start(
        self,
        input_ids_BL: torch.Tensor,
        row_N: torch.Tensor,
        position_N: torch.Tensor,
        target_N: torch.Tensor,
        *,
        after: object = None,
    ) -> PendingScores:
        self.chunks.append(self.chunk_logits)
        if 99 in target_N.tolist():
            raise Killed
        if 98 in target_N.tolist():
            raise LookupError("cannot start")
        if 88 in target_N.tolist() and not self.alone:
            raise torch.OutOfMemoryError
        self.started.append(int(target_N[0]))
        logprobs = torch.where(target_N == 66, torch.nan, -target_N.float())

        def check(found: torch.Tensor) -> None:
            if found.isnan().any():
                raise UserError("not finite")
            if -77.0 in found and self.reading.count(77) < 1:
                self.reading.append(77)
                raise KeyboardInterrupt
            if -55.0 in found:
                raise MemoryError

        return PendingScores(logprobs, target_N > 0, check)


class Cache(CacheHook):
    def add_partial(self, request_type: str, arguments: Any, answer: Any) -> None:
        if arguments == 44:
            raise OSError("no space left")


def run(
    targets: Sequence[int], ahead: int, rows: int = 1, relay: Any = None
) -> tuple[list[str], dict[int, float], Meter]:
    """What happened in which order, the answers kept, and the tokens counted, of windows of one token."""
    events: list[str] = []
    results: dict[int, float] = {}
    scorer = Scorer()
    if relay is not None:
        relay.scorer = scorer
    opened: Any = SimpleNamespace(device=torch.device("cpu"), mixed_precision_dtype=None, max_length=1)
    session = Session(
        opened=opened,
        prepared=Prepared(model=torch.nn.Identity()),
        relay=relay,
        scorer=scorer,
        rope=RequestRope(torch.nn.Identity(), None, None),
        meter=Meter(),
        learned_positions=None,
        **{name: BatchLimits() for name in ("batches", "own_batches", "generation_batches")},
        slots=SlotLimits(slots=None, prompt_tokens=1),
        **{"batches_ahead": ahead, "cache_hook": Cache(None), "quiet": True},
    )
    windows = {number: window_of([5], [[target]]) for number, target in enumerate(targets)}
    answers: Answers[int, float] = Answers(session, "loglikelihood", dict(enumerate(targets)), quiet=True)
    with contextlib.suppress(Killed, KeyboardInterrupt, DoesNotFit, LookupError, OSError):
        for number, (run,) in answers.each(
            score_windows(session, windows, batches=BatchLimits(max_rows=rows), name=str)
        ):
            answers.give(number, run.total)
            events.append(f"{len(scorer.started)} started, {targets[number]} done")
            results[targets[number]] = run.total
    return events, results, session.meter


MORE = [5, 6, 7, 8, 9, 10, 11, 12]
# targets, how many go into a batch, and with so many batches ahead which of them are done and how many batches start
RUNS: dict[str, tuple[list[int], int, Callable[[int], tuple[list[int], int]]]] = {
    "nothing goes wrong": ([4, 2, 3, 9], 1, lambda ahead: ([4, 2, 3, 9], 4)),
    "killed as it starts a batch": ([4, 2, 99, 3], 1, lambda ahead: ([4, 2], 2)),
    "interrupted as it waits": ([4, 77, 2, 3, 5], 1, lambda ahead: ([4, 77, 2, 3, 5][: 2 + ahead], 2 + ahead)),
    "no memory to read scores": ([4, 2, 55, 3, *MORE], 2, lambda ahead: ([4, 2, *MORE[: 2 * ahead]], 2 + ahead)),
    "no room for an answer": ([4, 2, 44, 3, *MORE], 2, lambda ahead: ([4, 2, 44, 3, *MORE[: 2 * ahead]], 2 + ahead)),
}


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_windows_are_scored_once_in_order_and_what_was_begun_before_a_run_ends_is_done(name, ahead):
    targets, rows, ending = RUNS[name]
    done, most = ending(ahead)
    events, results, meter = run(targets, ahead, rows)
    assert list(results.items()) == [(target, -float(target)) for target in done]
    assert events == [f"{min(1 + i // rows + ahead, most)} started, {target} done" for i, target in enumerate(done)]
    assert meter.tokens == len(done) or name == "no memory to read scores"


class Relayed:
    """A relay of two windows at once."""

    scorer: Any

    window = staticmethod(contextlib.nullcontext)

    @property
    def windows(self) -> int:
        return 1 if self.scorer.alone else 2

    def alone(self) -> bool:
        several, self.scorer.alone = not self.scorer.alone, True
        return several


def test_a_window_for_which_memory_ran_out_beside_others_runs_alone():
    relay = Relayed()
    assert list(run([4, 88, 2, 88, 3], 2, relay=relay)[1]) == [4, 88, 2, 3]
    assert relay.scorer.chunks == [2**29, 2**29, None, None, None, None]  # which are for several at once alone
    assert relay.scorer.chunk_logits is None
    assert list(run([4, 88], 2)[1]) == [4]


def test_results_that_nobody_asks_for_any_more_hold_nothing_of_the_model():
    held = [True]

    def results() -> Generator[int, None, None]:
        try:
            yield from (1, 2)
        finally:
            held.clear()

    session: Any = SimpleNamespace(cache_hook=CacheHook(None), quiet=True)
    answers: Answers[int, float] = Answers(session, "loglikelihood", {}, quiet=True)

    def stop_asking() -> None:
        with answers:
            for _ in answers.each(results()):
                raise LookupError

    with pytest.raises(LookupError) as raised:
        stop_asking()
    assert raised.tb
    assert not held


def test_scores_that_are_not_finite_keep_no_later_batch_from_being_done():
    events, results, _ = run([4, 2, 66, 3, 98], 3)
    assert (list(results), events[-1]) == ([4, 2, 3], "4 started, 3 done")


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_error_in_the_scores_ends_the_run(ahead):
    with pytest.raises(UserError, match="not finite"):
        run([4, 66, 2, 3], ahead)


def test_pending_scores_are_of_the_cpu():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pending = PendingScores(
        torch.zeros(3, device=device), torch.ones(3, dtype=torch.bool, device=device), lambda _: None
    )
    scores = pending.result()
    np.testing.assert_array_equal(scores.logprobs.numpy(), np.zeros(3))
    assert scores.greedy.tolist() == [True] * 3


class Elsewhere(torch.Tensor):
    """A tensor that remembers how it was copied."""

    copied: ClassVar[list[object]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to:
            cls.copied.append((kwargs or {}).get("non_blocking", False))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_device_without_events_is_waited_for():
    PendingScores(torch.zeros(3).as_subclass(Elsewhere), torch.ones(3).as_subclass(Elsewhere), lambda _: None)
    assert Elsewhere.copied == [False, False]


LENGTHS = st.lists(st.integers(1, 50), max_size=30).map(lambda lengths: sorted(lengths, reverse=True))


@settings(max_examples=15, deadline=None)
@given(
    lengths=LENGTHS,
    max_rows=st.none() | st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 300),
    memory_tokens=st.integers(50, 400),
    same_length=st.booleans(),
)
def test_every_item_runs_once_within_limits_and_memory(lengths, max_rows, max_tokens, memory_tokens, same_length):
    def run(batch: Sequence[int]) -> list[int]:
        if lengths[batch[0]] * len(batch) > memory_tokens:
            raise torch.OutOfMemoryError
        return list(batch)

    limits = BatchLimits(max_rows=max_rows, max_tokens=max_tokens, same_length=same_length)
    ran = list(run_in_batches(range(len(lengths)), run, length_tokens=lengths.__getitem__, limits=limits))
    assert all(list(batch) == result for batch, result in ran)
    batches = [result for _, result in ran]
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or len(batch) == 1 or len(batch) * lengths[batch[0]] <= max_tokens
        assert not same_length or len({lengths[index] for index in batch}) == 1


@pytest.mark.parametrize(
    ("message", "error", "sentence"),
    [
        ("DefaultCPUAllocator: can't allocate memory", UserError, "an input of 7 tokens to fit"),
        ("shapes do not fit", RuntimeError, "shapes do not fit"),
    ],
)
def test_an_item_that_never_fits_is_a_sentence_and_other_errors_are_raised_as_they_are(message, error, sentence):
    def run(batch: Sequence[int]) -> None:
        raise RuntimeError(message)

    with pytest.raises(error, match=sentence):
        list(run_in_batches([7, 7, 7], run, length_tokens=lambda item: item, limits=BatchLimits()))
