"""The request types that score, from requests to answers: lm-eval's own and those of this project's tasks."""

import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.answers import Answers, AnswersOnce, Instances, handed_over, request_name
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.open.tokenizer import warn_of_other_tokens
from sbeval.model_adapters.score.batch import ScoredWindows, score_texts
from sbeval.model_adapters.score.nested import share_windows
from sbeval.model_adapters.score.prefixes import score_after_prefixes
from sbeval.model_adapters.score.schedule import score_windows
from sbeval.model_adapters.score.windows import PlannedWindow, requested_window, rolling_windows, window_of
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Pairs, fit_contexts, record_facts
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.requests import (
    ATTENTION_SPAN,
    TARGET_LOGPROBS,
    TOKEN_LOGPROBS,
    AttentionSpanRequest,
    TargetLogprobs,
    TargetLogprobsRequest,
    TargetSequence,
    TokenLogprobs,
    TokenLogprobsRequest,
    resolve_sequence,
)
from sbeval.scoring.spans import attention_spans

logger = logging.getLogger(__name__)

_WITHOUT_CONTEXT = {"rolling", "stream"}
"""Protocols whose windows begin with a target: they have no context that a cache could hold."""


def loglikelihood(session: Session, requests: Instances, pairs: Pairs, *, quiet: bool) -> list[tuple[float, bool]]:
    """Returns each continuation's log-likelihood in nats, and whether all its tokens are the most probable ones.

    `pairs` holds the tokens of each request's context and continuation.
    """
    if session.thinking is not None and session.tally.chat:
        logger.warning(
            "continuations are scored directly after prompts that tell the model to think: leave thinking_tokens out "
            "for tasks that score answers"
        )
    session.check_tokens((request_name(request), pair) for request, pair in zip(requests, pairs, strict=True))
    contexts = fit_contexts(session, pairs, [request.task_name for request in requests])
    arguments = dict(enumerate(request.args for request in requests))
    groups: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    for index, context in enumerate(contexts):
        record_facts(requests[index], cut_tokens=context.cut_tokens)
        # through a replaced cache, a score depends on where the continuation begins
        begins = 0 if session.cache is None else len(pairs[index][1])
        groups[context.inputs, begins].append(index)
    members = list(groups.values())
    windows = [window_of(inputs, [pairs[index][1] for index in indices]) for (inputs, _), indices in groups.items()]
    left = dict.fromkeys(range(len(windows)))
    answers: Answers[int, tuple[float, bool]] = Answers(session, "loglikelihood", arguments, quiet=quiet)

    def name(group: int) -> str:
        return request_name(requests[members[group][0]])

    def results() -> ScoredWindows:
        yield from score_after_prefixes(session, [window.load() for window in windows], name=name)
        yield from score_windows(session, {group: windows[group] for group in left}, batches=session.batches, name=name)

    answers.count_tokens(sum(window.length for window in windows))
    with answers:
        for group, scores in answers.each(results()):
            del left[group]
            answers.read(windows[group].length)
            for index, run in zip(members[group], scores, strict=True):
                answers.give(index, (run.total, run.greedy))
    return answers.in_order()


def loglikelihood_rolling(
    session: Session, requests: Instances, texts: Sequence[Sequence[int]], *, lead_in: int, quiet: bool
) -> list[float]:
    """Returns the log-likelihood of each text in nats, computed in the same windows as in `hf`.

    `texts` holds the tokens of each request's text; `lead_in` is the input token before each text, such as BOS.
    """
    _refuse_cache(session, "rolling log-likelihoods")
    pairs = zip(requests, texts, strict=True)
    session.check_tokens((request_name(request), [text, [lead_in]]) for request, text in pairs)
    windows: dict[int, PlannedWindow] = {}
    text_of: list[int] = []
    for index, tokens in enumerate(texts):
        for window in rolling_windows(tokens, lead_in=lead_in, max_length=session.max_length):
            windows[len(windows)] = window
            text_of.append(index)
    waiting = Counter(text_of)
    totals = [0.0] * len(texts)  # stays 0 for a text without tokens
    arguments = dict(enumerate(request.args for request in requests))
    answers: Answers[int, float] = Answers(session, "loglikelihood_rolling", arguments, quiet=quiet)
    answers.count_tokens(sum(window.length for window in windows.values()))

    def name(number: int) -> str:
        return request_name(requests[text_of[number]])

    with answers:
        for number, (run,) in answers.each(score_windows(session, windows, batches=session.batches, name=name)):
            index = text_of[number]
            totals[index] += run.total
            waiting[index] -= 1
            answers.read(windows[number].length)
            if not waiting[index]:
                answers.give(index, totals[index])
    return totals


def token_logprobs(session: Session, requests: Instances, *, quiet: bool) -> list[TokenLogprobs]:
    """Answers each `TokenLogprobsRequest` with the log-probabilities of the last `scored` tokens of its window.

    Raises:
        UserError: windows of `rolling` or `stream` are scored through a replaced cache.
    """
    protocols = {str(getattr(request, "protocol", "")) for request in requests}
    for protocol in sorted(protocols & _WITHOUT_CONTEXT):
        _refuse_cache(session, f"the protocol {protocol}")
    warn_of_other_tokens(session.opened.tokenizer, [request.args[0] for request in requests])
    answers: AnswersOnce[TokenLogprobsRequest, TokenLogprobs]
    answers = AnswersOnce(session, requests, TOKEN_LOGPROBS, TokenLogprobsRequest, quiet=quiet)
    # with non_finite=null, NaN at the end of a longer window could spread to the scores of a shorter one
    each_alone = session.rope.by_length or session.scorer.non_finite == "null" or session.cache is not None
    shared = share_windows(answers.todo, nested=not each_alone)
    session.check_tokens(
        (answers.names[window.members[0][0]], [resolve_tokens(window.run.key), [window.run.lead_in]])
        for window in shared
    )

    def name(index: int) -> str:
        return answers.names[max(shared[index].members, key=lambda member: member[0].context_length)[0]]

    windows = {index: requested_window(window.run) for index, window in enumerate(shared)}
    answers.count_tokens(sum(window.length for window in windows.values()))
    with answers:
        for index, (run,) in answers.each(score_windows(session, windows, batches=session.own_batches, name=name)):
            answers.read(windows[index].length)
            for request, targets in shared[index].members:
                answers.give(request, TokenLogprobs(run.logprobs[targets].copy()))
    return answers.in_order()


def target_logprobs(session: Session, requests: Instances, *, quiet: bool) -> list[TargetLogprobs]:
    """Answers each `TargetLogprobsRequest` with the log-probability of every target that it names.

    Each answer also says of every target whether it is the most probable token.
    """
    answers: AnswersOnce[TargetLogprobsRequest, TargetLogprobs]
    answers = AnswersOnce(session, requests, TARGET_LOGPROBS, TargetLogprobsRequest, quiet=quiet)
    session.check_positions(max((request.inputs for request in answers.todo), default=0))
    session.check_tokens((answers.names[request], _load(request)[::2]) for request in answers.todo)

    answers.count_tokens(sum(request.inputs for request in answers.todo))
    with answers, session.autocast():
        for request, scores in answers.each(_score_targets(session, answers.todo, answers.names)):
            answers.read(request.inputs)
            answers.give(request, scores)
    return answers.in_order()


def attention_span(session: Session, requests: Instances, *, quiet: bool) -> list[list[list[Any]]]:
    """Answers each `AttentionSpanRequest` with the effective attention spans of every layer and head."""
    if session.cache is not None:
        raise UserError(
            f"Attention spans are those of a model without a cache, but cache={session.cache.choice} is set: remove it "
            "from --model_args."
        )
    warn_of_other_tokens(session.opened.tokenizer, [request.args[0] for request in requests])
    if session.rope.extrapolation is not None:
        raise UserError(
            f"Attention spans are those of a model that attends as it was trained to, but "
            f"extrapolation={session.rope.extrapolation} changes that: remove it from --model_args."
        )
    scorer = session.scorer
    answers: AnswersOnce[AttentionSpanRequest, list[list[Any]]]
    answers = AnswersOnce(session, requests, ATTENTION_SPAN, AttentionSpanRequest, quiet=quiet)
    session.check_positions(max((request.context_length for request in answers.todo), default=0))
    session.check_tokens((answers.names[request], [resolve_tokens(request.key)]) for request in answers.todo)

    def spans() -> Generator[tuple[AttentionSpanRequest, list[list[Any]]], None, None]:
        for request in answers.todo:
            session.meter.begin()
            tokens = torch.from_numpy(np.array(resolve_tokens(request.key), dtype=np.int64))[None].to(session.device)
            with session.autocast(), session.rope.hold(request.context_length):
                try:
                    rows = attention_spans(scorer.model, tokens, request.queries, non_finite=scorer.non_finite)
                except NonFiniteError as error:
                    raise error.of(answers.names[request]) from None
            session.meter.add(request.context_length)
            yield request, rows

    answers.count_tokens(sum(request.context_length for request in answers.todo))
    with answers:
        for request, rows in answers.each(spans()):
            answers.read(request.context_length)
            answers.give(request, rows)
    return answers.in_order()


def _score_targets(
    session: Session, requests: Sequence[TargetLogprobsRequest], names: Mapping[TargetLogprobsRequest, str]
) -> Generator[tuple[TargetLogprobsRequest, TargetLogprobs], None, None]:
    """Scores every request, longest first, and yields each with its scores when its batch is finished."""

    def score(batch: Sequence[TargetLogprobsRequest]) -> list[TargetLogprobs]:
        session.meter.begin()
        loaded = [_load(request) for request in batch]
        with session.rope.hold(batch[0].inputs):
            try:
                scores = _score_batch(session, loaded)
            except NonFiniteError as error:
                raise error.of(names[batch[error.row]]) from None
        session.meter.add(sum(request.inputs for request in batch))
        return scores

    again = functools.partial(score_texts, session)
    todo, begun = sorted(requests, key=lambda request: -request.inputs), 0
    if todo:
        session.real.begin(again)
    while begun < len(todo):  # if the check of a batch fails, its texts are scored again under tighter limits
        limits = session.real.limits(session.own_batches, "scoring")
        for batch, scores in run_in_batches(
            todo[begun:], score, length_tokens=lambda request: request.inputs, limits=limits
        ):
            if session.real.needs_check("one length", len(batch), batch[0].inputs):
                texts = [_load(request) for request in batch]
                if not session.real.stand("one length", texts, [each.logprobs for each in scores], again):
                    break
            begun += len(batch)
            yield from handed_over(zip(batch, scores, strict=True))
    if todo:
        session.real.end(again)


def _refuse_cache(session: Session, name: str) -> None:
    if session.cache is not None:
        raise UserError(
            f"cache={session.cache.choice} has no meaning for {name}, which scores targets without a context before "
            "them: use fixed_target or position, or remove cache from --model_args."
        )


def _load(request: TargetLogprobsRequest) -> TargetSequence:
    sequence = resolve_sequence(request.key)
    if len(sequence.inputs_L) != request.inputs or not len(sequence.targets_T):
        raise ValueError(f"{request} does not fit the {len(sequence.inputs_L)} inputs that its key names")
    return sequence


def _score_batch(session: Session, batch: Sequence[TargetSequence]) -> list[TargetLogprobs]:
    scores = session.scorer.score(
        torch.from_numpy(np.stack([sequence.inputs_L for sequence in batch])).to(session.device),
        torch.from_numpy(np.repeat(np.arange(len(batch)), [len(sequence.targets_T) for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.positions_T for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.targets_T for sequence in batch])),
    )
    ends = np.cumsum([len(sequence.targets_T) for sequence in batch])[:-1]
    logprobs, greedy = np.split(scores.logprobs.numpy(), ends), np.split(scores.greedy.numpy(), ends)
    return [TargetLogprobs(*pair) for pair in zip(logprobs, greedy, strict=True)]
