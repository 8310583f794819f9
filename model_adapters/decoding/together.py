"""Prompts longer than a batch: all processes of a group read them, and the process that has the request goes on alone.

A turn reads at most one prompt of each process, so no process holds keys and values of two, and all write their
answers at the same time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache

from sbeval.model_adapters.batching import DoesNotFit, out_of_memory
from sbeval.model_adapters.decoding.served import why_not_setting
from sbeval.model_adapters.decoding.stepper import ReadPrompt
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Prompt
from sbeval.scoring.context_parallel import ContextParallelScorer

Same = Mapping[int, Sequence[int]]
"""Indices of requests to run, each with the indices of all requests that have its answer."""


def answer_together(
    session: Session,
    hf: Any,
    groups: Sequence[Same],
    prompts: Sequence[Prompt],
    settings: Sequence[Mapping[str, Any]],
    answer: Callable[[Same, ReadPrompt], None],
) -> Sequence[Same]:
    """Answers the long prompts of all processes of a group, and returns this process's other requests.

    Args:
        session: of the model.
        hf: lm-eval's Hugging Face model.
        groups: this process's requests, grouped by setting.
        prompts: of all requests.
        settings: of all requests, as `normalize_gen_kwargs` returns them.
        answer: answers one request of `groups`; must call the function it is given once, to read all of the prompt
            but its last token.

    Raises:
        DoesNotFit: memory ran out.
    """
    scorer = session.scorer
    if not isinstance(scorer, ContextParallelScorer):
        return groups
    least = session.own_batches.max_tokens or 0
    own: list[Same] = [
        {index: same}
        for group in groups
        for index, same in group.items()
        if len(prompts[index].tokens) > least and _can_be_shared(hf.model, settings[index])
    ]
    lengths_tokens = {
        index: len(prompts[index].tokens) + prompts[index].budget_tokens for each in own for index in each
    }
    own.sort(key=lambda each: -lengths_tokens[next(iter(each))])
    everyone: list[list[int]] = scorer.context.gather_objects(sorted(lengths_tokens.values(), reverse=True))
    for place in range(max(map(len, everyone))):
        asked = [(rank, lengths[place]) for rank, lengths in enumerate(everyone) if place < len(lengths)]
        turn = _Turn(session, scorer, asked)
        if place < len(own):
            answer(own[place], turn)
        else:
            turn()
    return [{index: same for index, same in group.items() if index not in lengths_tokens} for group in groups]


class _Turn:
    """Reads a prompt of each process that has one; all processes must call it once.

    Args:
        session: of the model.
        scorer: of the group.
        asked: the ranks that have a prompt, each with the tokens of prompt and answer.
    """

    def __init__(self, session: Session, scorer: ContextParallelScorer, asked: Sequence[tuple[int, int]]) -> None:
        self._session, self._scorer, self._asked = session, scorer, asked
        self._over = False

    def __call__(self, ids_1L: Tensor | None = None, cache: Cache | None = None) -> None:
        session, context = self._session, self._scorer.context
        if self._over:  # this process alone tries again, since its memory ran out
            raise self._does_not_fit(dict(self._asked)[context.rank])
        for rank, length_tokens in self._asked:
            try:
                mine = rank == context.rank
                ids = context.from_rank(rank, ids_1L.cpu() if mine and ids_1L is not None else None)
                with session.autocast(), session.rope.hold(length_tokens):
                    self._scorer.read_together(ids.to(session.device), rank, cache if mine else None)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                raise self._does_not_fit(length_tokens) from error
        self._over = True

    def _does_not_fit(self, length_tokens: int) -> DoesNotFit:
        return DoesNotFit(
            f"Expected a prompt and an answer of {length_tokens} tokens to fit into the memory of "
            f"{self._scorer.context.ranks} processes, one of which holds all keys and values, but it ran out: use a "
            "larger context_parallel, a shorter length or dtype=bfloat16."
        )


def _can_be_shared(model: Any, setting: Mapping[str, Any]) -> bool:
    """Whether an answer is a single text that can continue from keys and values read before."""
    own_cache = getattr(model.generation_config, "cache_implementation", None)
    return own_cache is None and why_not_setting(model, {**setting, "do_sample": False}) is None
