"""Inputs that share a prefix, such as questions after the same few-shot examples: the model prefills the prefix once.

The inputs with the same prefix form a group. While the prefix's KV cache is in memory, the remaining tokens of these
inputs run in batches. The host reads the scores of a batch before the next batch starts, unlike in `schedule`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sbeval.model_adapters.answers import handed_over
from sbeval.model_adapters.batching import DoesNotFit, free_memory, out_of_memory, run_in_batches
from sbeval.model_adapters.score.batch import (
    RequestName,
    ScoredWindows,
    WindowScores,
    joined,
    score_texts,
    start_batch,
)
from sbeval.model_adapters.score.windows import LoadedWindow, TokenIds, as_sequence
from sbeval.model_adapters.session import Session
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.scorer import Prefix

_BIG_ENDIAN = np.dtype(">u4")


class Worthwhile(NamedTuple):
    """The thresholds above which a shared prefix is prefilled in a separate forward pass.

    Attributes:
        prefix_tokens: the least length of the prefix.
        saved_tokens: the least number of tokens that the model need not read, over all inputs with this prefix.
    """

    prefix_tokens: int
    saved_tokens: int


ON_CPU = Worthwhile(32, 32)
ON_GPU = Worthwhile(256, 8192)


class SharedPrefix(NamedTuple):
    """The length of a prefix in tokens, and the indices of the inputs that begin with it."""

    length: int
    members: list[int]


def shared_prefixes(
    inputs: Sequence[Sequence[int] | TokenIds], first_targets: Sequence[int], worthwhile: Worthwhile
) -> list[SharedPrefix]:
    """Groups inputs by shared prefix, and returns the groups, longest prefix first; some inputs are in no group.

    Inputs are sorted by their tokens and taken in order. An input joins the current group if the group then saves at
    least as many tokens as before, although its prefix may become shorter. Inputs that are more than twice as long as
    the prefix are left out of the group, since the prefix saves them little time. `first_targets` holds, for each
    input, the position whose output predicts the first target; the prefix ends before this position.
    """
    # big-endian bytes sort as the token ids do, and sort faster
    packed = [np.asarray(tokens, dtype=_BIG_ENDIAN).tobytes() for tokens in inputs]
    order = sorted(range(len(inputs)), key=lambda index: packed[index])
    groups: list[SharedPrefix] = []
    for index in order:
        end = first_targets[index]
        if groups:
            length, members = groups[-1]
            common = min(length, end, _common(packed[members[-1]], packed[index]))
            if common >= worthwhile.prefix_tokens and len(members) * common >= (len(members) - 1) * length:
                groups[-1] = SharedPrefix(common, [*members, index])
                continue
        groups.append(SharedPrefix(end, [index]))
    worthwhile_groups = []
    for length, members in groups:
        near = [index for index in members if len(inputs[index]) <= 2 * length]
        if (len(near) - 1) * length >= max(1, worthwhile.saved_tokens):
            worthwhile_groups.append(SharedPrefix(length, near))
    return sorted(worthwhile_groups, key=lambda group: -group.length)


def score_after_prefixes(session: Session, windows: Sequence[LoadedWindow], *, name: RequestName) -> ScoredWindows:
    """Scores the windows that share a prefix with others, and yields each window's number with its scores.

    Windows without a shared prefix are not yielded. The generator ends early if the model cannot continue from a KV
    cache or if memory runs out. The caller scores all windows that were not yielded.

    Raises:
        UserError: a window is longer than the model's learned positions.
        NonFiniteError: a log-probability is not finite.
    """
    if session.rope.by_length or not session.self_test.prefixes:
        return
    first_targets = [len(window.inputs) - max(map(len, window.target_runs)) for window in windows]
    worthwhile = ON_CPU if session.device.type == "cpu" else ON_GPU
    groups = shared_prefixes([window.inputs for window in windows], first_targets, worthwhile)
    session.check_positions(max((len(windows[index].inputs) for group in groups for index in group.members), default=0))
    limits = dataclasses.replace(session.batches, max_tokens=session.own_batches.max_tokens)

    again = functools.partial(score_texts, session)

    def go_on(batch: Sequence[int], length: int, prefix: Prefix) -> list[WindowScores]:
        session.meter.begin()
        rest = [LoadedWindow(windows[index].inputs[length:], windows[index].target_runs) for index in batch]
        with session.rope.hold(len(windows[batch[0]].inputs)):
            try:
                scores = start_batch(session, rest, after=prefix).result()
            except NonFiniteError as error:
                raise error.of(name(batch[error.row])) from None
        session.meter.add(sum(len(window.inputs) for window in rest))
        return scores

    with session.autocast():
        if groups:
            session.real.begin(again)
        for group in groups:
            try:
                session.meter.begin()
                first = windows[group.members[0]].inputs
                with session.rope.hold(len(first)):
                    prefix = session.scorer.read(torch.from_numpy(first[: group.length]).to(session.device))
                if prefix is None:
                    return
                session.meter.add(group.length)
                for batch, scores in run_in_batches(
                    sorted(group.members, key=lambda index: -len(windows[index].inputs)),
                    functools.partial(go_on, length=group.length, prefix=prefix),
                    length_tokens=lambda index: len(windows[index].inputs),
                    limits=limits,
                ):
                    longest = len(windows[batch[0]].inputs)
                    if session.real.needs_check("after a prefix", len(batch), longest):
                        texts = [as_sequence(windows[index]) for index in batch]
                        if not session.real.stand("after a prefix", texts, [joined(each) for each in scores], again):
                            return
                        session.meter.begin()
                    yield from handed_over(zip(batch, scores, strict=True))
            except (RuntimeError, MemoryError, DoesNotFit) as error:
                if not isinstance(error, DoesNotFit) and not out_of_memory(error):
                    raise
                prefix = None  # frees the KV cache of the prefix
                free_memory()
                return


def _common(first: bytes, second: bytes) -> int:
    """Returns the number of leading tokens that two inputs, packed as bytes, have in common."""
    tokens = min(len(first), len(second)) // _BIG_ENDIAN.itemsize
    differ = np.flatnonzero(np.frombuffer(first, np.uint32, tokens) != np.frombuffer(second, np.uint32, tokens))
    return int(differ[0]) if len(differ) else tokens
