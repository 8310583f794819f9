"""Context parallelism: all ranks of a process group together prefill each prompt that is longer than a batch may be.

The rank with the request then gets all cached keys and values, and decodes without the other ranks. In one turn, the
group prefills at most one prompt of each rank. So no rank holds the KV caches of two prompts, and all ranks decode at
the same time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from sbeval.model_adapters.batching import DoesNotFit, fitting
from sbeval.model_adapters.generate.slots.served import why_not_setting
from sbeval.model_adapters.generate.slots.stepper import ReadPrompt
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Prompt
from sbeval.scoring.context_parallel import ContextParallelScorer


def prompts_together(session: Session, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, ReadPrompt]]:
    """Yields each long prompt of this rank with the function that prefills it; joins the prefills of other ranks, too.

    The caller must call the function once before it takes the next prompt. The function prefills all tokens of the
    prompt but the last.

    Raises:
        DoesNotFit: memory ran out.
    """
    scorer = session.scorer
    if not isinstance(scorer, ContextParallelScorer):
        return
    least = session.own_batches.max_tokens or 0
    long = [p for p in prompts if len(p.tokens) > least and _can_be_shared(session.opened.model, p.setting)]
    long.sort(key=lambda prompt: -prompt.length_tokens)
    everyone: list[list[int]] = scorer.context.gather_objects([prompt.length_tokens for prompt in long])
    for place in range(max(map(len, everyone))):
        turn_lengths = [(rank, lengths[place]) for rank, lengths in enumerate(everyone) if place < len(lengths)]
        turn = _Turn(session, scorer, turn_lengths)
        if place < len(long):
            yield long[place], turn
        else:
            turn()


class _Turn:
    """One turn: prefills at most one prompt of each rank. Every rank must call this object once.

    `lengths` holds the prompts of the turn: the rank with the prompt, and the most tokens of prompt and answer.
    """

    def __init__(self, session: Session, scorer: ContextParallelScorer, lengths: Sequence[tuple[int, int]]) -> None:
        self._session, self._scorer, self._lengths = session, scorer, lengths
        self._over = False

    def __call__(self, ids_1L: Tensor | None = None, cache: Cache | None = None) -> None:
        session, context = self._session, self._scorer.context
        if self._over:  # a second call after this rank ran out of memory: the other ranks no longer take part
            raise DoesNotFit(self._does_not_fit(dict(self._lengths)[context.rank]))
        for rank, length_tokens in self._lengths:
            with fitting(self._does_not_fit(length_tokens)):
                is_own_rank = rank == context.rank
                ids = context.from_rank(rank, ids_1L.cpu() if is_own_rank and ids_1L is not None else None)
                with session.autocast(), session.rope.hold(length_tokens):
                    self._scorer.read_together(ids.to(session.device), rank, cache if is_own_rank else None)
        self._over = True

    def _does_not_fit(self, length_tokens: int) -> str:
        return (
            f"Expected a prompt and an answer of {length_tokens} tokens to fit into the memory of "
            f"{self._scorer.context.ranks} processes, one of which holds all keys and values, but it ran out: use a "
            "larger context_parallel, a shorter length or dtype=bfloat16."
        )


def _can_be_shared(model: Any, setting: Mapping[str, Any]) -> bool:
    """Whether a setting generates a single text, and the model can continue from a cache that the group prefilled."""
    own_cache = getattr(model.generation_config, "cache_implementation", None)
    return own_cache is None and why_not_setting(model, {**setting, "do_sample": False}) is None
