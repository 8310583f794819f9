"""LongPPL: perplexity on the tokens that need their long context, chosen by one named evaluator model.

After Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (arXiv 2410.23771): a target is a
key token if the evaluator gains more than `LEAST_GAIN_NATS` on it from the long context over the short one, and its
log-probability with the long one is above `LEAST_LOGPROB_NATS`. Here the long and the short context are the run's
longest and shortest length, so that the key tokens are the same at every length and for every model.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.tasks.perplexity.evaluator_cache import EvaluatorCache, evaluator_identity
from sbeval.token_logprobs import TokenLogprobsRequest

LEAST_GAIN_NATS = 2.0
LEAST_LOGPROB_NATS = -2.0


def key_tokens(
    evaluator: str, pairs: Sequence[tuple[TokenLogprobsRequest, TokenLogprobsRequest]], *, tokenizer_hash: str
) -> list[NDArray[np.bool_]]:
    """Returns, for each pair of requests with the same targets, which targets are key tokens.

    Args:
        evaluator: checkpoint folder or hub id of a causal language model; it is loaded where an answer is not kept
            from an earlier run, used and let go.
        pairs: requests at the short and the long context.
        tokenizer_hash: hash of the tokenizer behind the requests; the evaluator's has to be the same.
    """
    judge = _Evaluator(evaluator, tokenizer_hash)
    masks = []
    for short, long in pairs:
        short_logprobs, long_logprobs = judge.logprobs(short), judge.logprobs(long)
        gain = long_logprobs - short_logprobs
        masks.append((gain > LEAST_GAIN_NATS) & (long_logprobs > LEAST_LOGPROB_NATS))
    judge.cache.write()
    return masks


class _Evaluator:
    """The evaluator model, loaded when a request needs it."""

    def __init__(self, name: str, tokenizer_hash: str) -> None:
        from transformers import AutoTokenizer

        self._name = name
        try:
            same = tokenizer_sha256(AutoTokenizer.from_pretrained(name)) == tokenizer_hash
            self.cache = EvaluatorCache(evaluator_identity(name))
        except (OSError, ValueError, KeyError) as error:
            raise self._does_not_load(error) from error
        if not same:
            raise UserError(
                f"Expected a LongPPL evaluator with the evaluated model's tokenizer, found another one in {name!r}: "
                "name an evaluator that shares the tokenizer."
            )

    def logprobs(self, request: TokenLogprobsRequest) -> NDArray[np.float64]:
        """Returns the log-probabilities of a request's scored targets, float64 [scored]."""
        found = self.cache.read(request)
        if found is None:
            found = self._computed(request)
            self.cache.keep(request, found)
        return found

    def _computed(self, request: TokenLogprobsRequest) -> NDArray[np.float64]:
        import torch

        scorer, device = self._scorer
        targets = torch.from_numpy(resolve_tokens(request.key).astype(np.int64))
        inputs = torch.cat([torch.tensor([request.lead_in]), targets[:-1]])[None].to(device)
        positions = torch.arange(request.context_length - request.scored, request.context_length)
        scores = scorer.score(inputs, torch.zeros_like(positions), positions, targets[-request.scored :])
        return np.asarray(scores.logprobs.numpy(), np.float64)

    @cached_property
    def _scorer(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
        from sbeval.scoring import TokenScorer

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self._name, dtype="auto")
        except (OSError, ValueError, KeyError) as error:
            raise self._does_not_load(error) from error
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return TokenScorer(model.to(device).eval()), device

    def _does_not_load(self, error: Exception) -> UserError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return UserError(
            f"Expected an evaluator model for LongPPL at {self._name!r}, found none that loads ({reason}): "
            "correct longppl_evaluator."
        )
