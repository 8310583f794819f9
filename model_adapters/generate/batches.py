"""Generation in batches by transformers' `generate`, for models and settings that `slots` does not support."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from sbeval.caches.build import CacheBuilder
from sbeval.errors import UserError
from sbeval.model_adapters.answers import handed_over
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.generate.call import call_generate, without_cache
from sbeval.model_adapters.generate.growing_cache import growing_cache, steps_without_plans
from sbeval.model_adapters.generate.slots.schedule import Continuations
from sbeval.model_adapters.generate.slots.served import greedy_setting, why_not_setting
from sbeval.model_adapters.generate.slots.stepper import ReadPrompt
from sbeval.model_adapters.generate.texts import Continuation, stop_texts, up_to_end
from sbeval.model_adapters.self_test.outcome import WITHOUT_CACHE
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Prompt
from sbeval.scoring.body import cache_argument
from sbeval.scoring.non_finite import FiniteWatch, NonFiniteError

_GREEDY_TOKENS = 8
_OTHER_CACHES = {"past_key_values", "cache", "cache_implementation", "prompt_lookup_num_tokens", "assistant_model"}
"""Arguments of `generate` that replace the cache, or remove tokens from it again, which not every cache can."""


def generate_in_batches(session: Session, prompts: Sequence[Prompt], read: ReadPrompt | None) -> Continuations:
    """Continues prompts that share one setting, and yields each prompt's index and new tokens when its batch is done.

    If `read` is passed, there is one prompt, and `read` prefills it instead of the model's forward.

    Raises:
        UserError: every way to generate with this model has failed its check.
    """

    def run(batch: Sequence[Prompt]) -> list[Continuation]:
        session.meter.begin()
        with session.rope.hold(batch[0].length_tokens):
            return _generate(session, batch, read)

    longest_first, begun = sorted(prompts, key=lambda prompt: -prompt.length_tokens), 0
    while begun < len(longest_first):  # if the check of a batch fails, it is generated again under tighter limits
        limits = session.real.limits(session.generation_batches, "generation")
        for batch, continuations in run_in_batches(
            longest_first[begun:], run, length_tokens=lambda prompt: prompt.length_tokens, limits=limits
        ):
            if not _stand(session, batch, continuations):
                session.self_test.check("generation")
                break
            begun += len(batch)
            yield from handed_over(zip([prompt.index for prompt in batch], continuations, strict=True))


def _stand(session: Session, batch: Sequence[Prompt], continuations: Sequence[Continuation]) -> bool:
    """Whether the answers of a batch are right: some are compared with forward passes over prompt and answer.

    If the setting uses sampling or beam search, a few greedy tokens are generated after the same prompts and checked
    instead.
    """
    model, length = session.opened.model, batch[0].length_tokens
    padded = len({len(prompt.tokens) for prompt in batch}) > 1
    if not session.real.needs_answer_check(rows=len(batch), length=length, padded=padded):
        return True
    setting = greedy_setting(batch[0].setting)
    with session.rope.hold(length):
        if why_not_setting(model, setting) is not None:
            setting = {"until": [], "max_gen_toks": min(_GREEDY_TOKENS, setting["max_gen_toks"]), "num_beams": 1}
            if why_not_setting(model, greedy_setting(setting)) is not None:
                return True  # no check: the model's generation config prevents plain greedy decoding
            prompts = [dataclasses.replace(prompt, setting={**setting, "do_sample": False}) for prompt in batch]
            continuations = _generate(session, prompts, None)
        if not all(continuation.sound for continuation in continuations):
            return True
        stands = session.real.answers_stand(
            [(prompt.tokens, written.tokens) for prompt, written in zip(batch, continuations, strict=True)],
            length=length,
            not_early=session.opened.end_token_ids,
            fewest=setting.get("min_new_tokens") or 0,
        )
    session.meter.begin()
    return stands


def _generate(session: Session, prompts: Sequence[Prompt], read: ReadPrompt | None) -> list[Continuation]:
    opened, kwargs = session.opened, dict(prompts[0].setting)
    model, tokenizer = opened.model, opened.tokenizer
    stop = stop_texts(tokenizer, kwargs.pop("until"))
    budget = kwargs.pop("max_gen_toks")
    input_ids, mask = pad_left(prompts, tokenizer.pad_token_id, session.device)
    longest = kwargs.pop("max_length", input_ids.shape[1] + budget)
    caches = session.self_test.generation != WITHOUT_CACHE
    if session.cache is not None:
        kwargs |= _replaced_cache(session.cache, kwargs, longest, caches=caches)
    elif caches and not {"past_key_values", "cache"} & kwargs.keys():
        cache = growing_cache(model, kwargs.get("cache_implementation"))
        if read is not None:
            cache = DynamicCache(config=model.config) if cache is None else cache
            read(input_ids[:, :-1], cache)
        kwargs |= {} if cache is None else {cache_argument(model): cache}
    watch = FiniteWatch(len(prompts), session.device)
    kwargs |= watch.arguments()
    try:
        explaining = contextlib.nullcontext() if session.cache is None else session.cache.explaining(only_cache=True)
        with explaining, steps_without_plans(model), contextlib.nullcontext() if caches else without_cache(model):
            output = call_generate(opened, input_ids, mask_BL=mask, stop=stop, max_length=longest, **kwargs)
    except ValueError as error:
        if "`model_kwargs` are not used" not in str(error):
            raise
        remedy = "correct them in --gen_kwargs or the task"
        raise UserError(f"transformers does not know some generation arguments ({error}): {remedy}.") from error
    ends = kwargs.get("eos_token_id", model.generation_config.eos_token_id)
    continuations = [up_to_end(tokens, ends) for tokens in output[:, input_ids.shape[1] :].tolist()]
    sound = [True] * len(prompts)
    for row, first in enumerate(watch.first_tokens(len(prompts))):
        before = continuations[row][: first - input_ids.shape[1]] if first else continuations[row]
        # a row may get NaN after its answer is complete, while other rows of the batch go on; that does no harm
        if len(before) < len(continuations[row]) and not any(text in tokenizer.decode(before) for text in stop):
            continuations[row], sound[row] = before, False
    return [*map(Continuation, continuations, sound)]


def _replaced_cache(builder: CacheBuilder, setting: Mapping[str, Any], longest: int, *, caches: bool) -> dict[str, Any]:
    """Returns the arguments of `generate` for an empty cache of this text.

    Raises:
        UserError: the request names a cache too, or drafts tokens, which are removed from the cache again; or the
            model's caches failed the self-test.
    """
    if named := sorted(_OTHER_CACHES & setting.keys()):
        raise UserError(
            f"A request sets {named[0]}, but cache={builder.choice} is set in --model_args: remove one of them."
        )
    if not caches:
        raise UserError(
            f"cache={builder.choice} needs a model that continues from a cache, but this model failed that test: "
            "remove cache from --model_args."
        )
    return {cache_argument(builder.model): builder.make(longest), "disable_compile": True}


def check_batch(watch: FiniteWatch, decoded: Sequence[list[int]], ends: int | Sequence[int] | None) -> None:
    """Checks that the logits of an encoder-decoder model were finite until each answer was complete.

    Each row of `decoded` starts with the decoder's start token; `ends` are the end tokens.

    Raises:
        NonFiniteError: logits were NaN or infinite before an answer was complete.
    """
    for tokens, first in zip(decoded, watch.first_tokens(len(decoded)), strict=True):
        if first is not None and first - 1 < len(up_to_end(tokens[1:], ends)):
            raise NonFiniteError(f"Expected finite logits, found NaN or infinity for token {first} of an answer")


def pad_left(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns left-padded input ids and the attention mask of prompts, both int64 [B, longest prompt]."""
    tokens = [torch.from_numpy(prompt.tokens) for prompt in prompts]
    input_ids = pad_sequence(tokens, batch_first=True, padding_value=pad_token_id, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True, padding_side="left")
    return input_ids.to(device), mask.to(device)
