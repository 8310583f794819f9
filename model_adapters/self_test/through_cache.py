"""Tests a replaced KV cache (`cache=...`) on a short text, and measures its bytes a token, before the first request.

The text has `TOKENS` tokens; its second half is scored through the cache. For this test a quantized cache has a
residual of `_RESIDUAL` tokens instead of 128, so that it rounds several times within the text.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from sbeval.caches.build import CacheBuilder
from sbeval.caches.choice import CacheChoice
from sbeval.caches.size import cache_bytes
from sbeval.caches.suited import sliding_windows
from sbeval.errors import UserError
from sbeval.model_adapters.batching import fitting
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.self_test.measured import MOST_DRAWS, TIMES_LARGEST, TIMES_ROUNDING, TOKENS
from sbeval.model_adapters.self_test.outcome import Check
from sbeval.model_adapters.self_test.real import RealBatches
from sbeval.model_adapters.session import Session
from sbeval.processes import ranks
from sbeval.scoring.rounding import least, rounded_anew
from sbeval.scoring.scorer import TokenScorer
from sbeval.scoring.through_cache import CacheScorer

# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
logger = logging.getLogger("lm_eval.sbeval.self_test")

FULL = "a full cache gives the scores of whole texts"
AGAIN = "the same text read again"
ONE_BY_ONE = "targets read one by one"
LATER_TARGETS = "earlier targets do not see later ones"
_RESIDUAL = 8
_CONTEXT = TOKENS // 2
_CHANGED = 9
_MOST_MEASURED_TOKENS = 1100
"""Longest prompt that is read to measure the bytes of a token: enough for windows of 1,024 tokens."""
_NO_ROOM = "Expected memory beside the model for reading a short text through the cache, but it ran out: free some."
Scores = NDArray[np.float32]
Score = Callable[[Any], Scores]


@torch.no_grad()
def with_tested_cache(session: Session) -> Session:
    """Tests the cache of a session, and returns the session with the outcome; without `cache=...` it stays as it is.

    Rows of the run's own batches are not checked: each is one text, and its scores are those of the cache.

    Raises:
        UserError: the cache does not run with the model, or it failed a check.
    """
    builder = session.cache
    if builder is None:
        return session
    session = dataclasses.replace(session, real=RealBatches(session.self_test))
    facts = builder.facts()
    opened = session.opened
    enough = session.learned_positions is None or session.learned_positions >= TOKENS
    with fitting(_NO_ROOM), session.autocast(), session.rope.hold(TOKENS):
        if enough:
            facts |= _bytes(session, builder)
        if not opened.options.self_test or not enough:
            facts["untested"] = "self_test=false" if enough else f"the model has {session.learned_positions} positions"
        else:
            checks, difference = _checks(session, builder)
            facts["checks"] = {name: dataclasses.asdict(check) for name, check in checks.items()}
            facts["difference_nats"] = difference
            failed = {name: check for name, check in checks.items() if not check.passed}
            if ranks.is_first_process():
                logger.info(
                    "self-test: cache=%s passed %d of %d checks", builder.choice, len(checks) - len(failed), len(checks)
                )
            if failed:
                failures = ", ".join(f"{name}: {check}" for name, check in failed.items())
                raise UserError(
                    f"cache={builder.choice} failed the self-test ({failures}): {_remedy(builder)}, or pass "
                    "self_test=false in --model_args to run it all the same."
                )
    return dataclasses.replace(session, cache_facts=facts)


def _remedy(builder: CacheBuilder) -> str:
    if builder.choice.kind != "function":
        return "use another cache"
    return "correct the function" + (", pass cache_chunk=1" if builder.chunk_tokens != 1 else "")


def _checks(session: Session, builder: CacheBuilder) -> tuple[dict[str, Check], float]:
    """Returns the results of the checks, and the mean difference in nats of the cache from no cache."""
    opened, model, tested = session.opened, session.opened.model, builder.with_residual(_RESIDUAL)
    tokens = np.array(sample_tokens(opened.tokenizer, opened.embeddings, TOKENS + 1), dtype=np.int64)
    changed = tokens.copy()
    changed[-_CHANGED - 1 :] = np.roll(tokens, 7)[-_CHANGED - 1 :]
    whole, through_full = TokenScorer(model), CacheScorer(model, _full(model))
    through, singly = CacheScorer(model, tested), CacheScorer(model, tested.with_chunk(1))
    limit = _Limit(opened)
    scores, plain = _scores(through, tokens), _scores(whole, tokens)
    expected = _scores(through, tokens)
    early = slice(0, TOKENS - _CONTEXT - _CHANGED - 1)  # the targets that are the same in both texts
    checks = {
        FULL: limit.check(_scores(through_full, tokens), plain, lambda: _scores(through_full, tokens)),
        AGAIN: limit.check(scores, expected),
        LATER_TARGETS: limit.check(
            _scores(through, changed)[early], scores[early], lambda: _scores(through, tokens)[early]
        ),
    }
    if tested.chunk_tokens != 1:
        checks[ONE_BY_ONE] = limit.check(_scores(singly, tokens), scores, lambda: _scores(through, tokens))
    if builder.choice.kind in ("static", "offloaded"):
        checks[FULL] = limit.check(scores, plain, lambda: _scores(through, tokens))
    return checks, float(np.mean(plain.astype(np.float64) - scores))


def _full(model: Any) -> CacheBuilder:
    """Returns the builder of transformers' default cache."""
    return CacheBuilder(
        choice=CacheChoice(kind="function", function="transformers:DynamicCache"),
        model=model,
        chunk_tokens=None,
        make_cache=lambda model: DynamicCache(config=model.config),
    )


class _Limit:
    """Compares scores with those of another pass: the limit is what random rounding errors in the model do to them."""

    def __init__(self, opened: Opened) -> None:
        self._model = opened.model
        self._least = least(opened.mixed_precision_dtype or opened.model.dtype, opened.device)

    def check(self, scores: Scores, expected: Scores, again: Callable[[], Scores] | None = None) -> Check:
        """Returns whether rounding explains the difference; `again` computes the expected scores once more.

        Without `again` no errors are drawn, and the limit is that of the dtype.
        """
        difference, allowed = _mean(scores, expected), self._least
        for seed in range(MOST_DRAWS if again is not None else 0):
            assert again is not None
            if difference <= allowed or not np.isfinite(difference):
                break
            with rounded_anew(self._model, seed=seed, times=TIMES_ROUNDING):
                allowed = max(allowed, TIMES_LARGEST * _mean(again(), expected))
        return Check(passed=bool(difference <= allowed), difference=difference, reason="nats")


def _scores(scorer: TokenScorer, tokens: NDArray[np.int64]) -> Scores:
    """Returns the log-probabilities of all targets behind the first `_CONTEXT` inputs."""
    positions = torch.arange(_CONTEXT, TOKENS)
    inputs = torch.from_numpy(tokens[None, :-1]).to(next(scorer.model.parameters()).device)
    targets = torch.from_numpy(tokens[_CONTEXT + 1 :])
    return scorer.score(inputs, torch.zeros_like(positions), positions, targets).logprobs.numpy()


def _mean(scores: Scores, expected: Scores) -> float:
    return float(np.abs(scores.astype(np.float64) - expected).mean())


def _bytes(session: Session, builder: CacheBuilder) -> dict[str, Any]:
    """Returns the bytes that each further token of a prompt adds to the cache and to a full one, and where.

    They are measured on two prompts, both at least as long as the model's sliding windows, and None if those are too
    long to be read in a moment. For a cache with room for all its tokens, such as a static one, they are the bytes of a
    token's room.
    """
    opened = session.opened
    begin = max(_CONTEXT, *sliding_windows(opened.model.config), 0)
    lengths = (begin, begin + _CONTEXT)
    if lengths[1] > min(_MOST_MEASURED_TOKENS, session.learned_positions or _MOST_MEASURED_TOKENS):
        return {"bytes_per_token": None, "full_bytes_per_token": None, "bytes_at_tokens": None}
    tokens = sample_tokens(opened.tokenizer, opened.embeddings, lengths[1])

    def bytes_per_token(measured: CacheBuilder) -> float:
        scorer = CacheScorer(opened.model, measured)
        inputs = torch.tensor([tokens], device=opened.device)
        shorter, longer = (cache_bytes(scorer.filled(inputs[:, :length])) for length in lengths)
        return (longer - shorter) / (lengths[1] - lengths[0])

    with session.rope.hold(lengths[1]):
        return {
            "bytes_per_token": bytes_per_token(builder),
            "full_bytes_per_token": bytes_per_token(_full(opened.model)),
            "bytes_at_tokens": list(lengths),
        }
