"""LongPPL: perplexity on the tokens that need their long context, chosen by one named evaluator model.

After Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (arXiv 2410.23771): a target is a
key token if the evaluator gains more than `LEAST_GAIN_NATS` on it from the long context over the short one, and its
log-probability with the long one is above `LEAST_LOGPROB_NATS`. Here the long and the short context are the run's
longest and shortest length, so that the key tokens are the same at every length and for every model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.token_logprobs import TokenLogprobsRequest

LEAST_GAIN_NATS = 2.0
LEAST_LOGPROB_NATS = -2.0


def key_tokens(
    evaluator: str, pairs: Sequence[tuple[TokenLogprobsRequest, TokenLogprobsRequest]], *, tokenizer_hash: str
) -> list[NDArray[np.bool_]]:
    """Returns, for each pair of requests with the same targets, which targets are key tokens.

    Args:
        evaluator: checkpoint folder or hub id of a causal language model; it is loaded, used and let go.
        pairs: requests at the short and the long context.
        tokenizer_hash: hash of the tokenizer behind the requests; the evaluator's has to be the same.
    """
    scorer, device = _load(evaluator, tokenizer_hash)
    masks = []
    for short, long in pairs:
        short_logprobs, long_logprobs = (_logprobs(scorer, request, device) for request in (short, long))
        gain = long_logprobs - short_logprobs
        masks.append((gain > LEAST_GAIN_NATS) & (long_logprobs > LEAST_LOGPROB_NATS))
    return masks


def _load(evaluator: str, tokenizer_hash: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
    from sbeval.scoring import TokenScorer

    try:
        tokenizer = AutoTokenizer.from_pretrained(evaluator)
        same = tokenizer_sha256(tokenizer) == tokenizer_hash
        model: Any = AutoModelForCausalLM.from_pretrained(evaluator, dtype="auto") if same else None
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"Expected an evaluator model for LongPPL at {evaluator!r}, found none that loads ({reason}): "
            "correct longppl_evaluator."
        ) from error
    if model is None:
        raise UserError(
            f"Expected a LongPPL evaluator with the evaluated model's tokenizer, found another one in {evaluator!r}: "
            "name an evaluator that shares the tokenizer."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TokenScorer(model.to(device).eval()), device


def _logprobs(scorer: Any, request: TokenLogprobsRequest, device: Any) -> NDArray[np.float64]:
    import torch

    targets = torch.from_numpy(resolve_tokens(request.key).astype(np.int64))
    inputs = torch.cat([torch.tensor([request.lead_in]), targets[:-1]])[None].to(device)
    positions = torch.arange(request.context_length - request.scored, request.context_length)
    scores = scorer.score(inputs, torch.zeros_like(positions), positions, targets[-request.scored :])
    return np.asarray(scores.logprobs.numpy(), np.float64)
