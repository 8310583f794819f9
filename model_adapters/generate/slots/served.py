"""Generates greedy requests in slots (this project's decode loop), or says why transformers' `generate` is needed."""

import functools
import logging
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbeval.errors import first_line
from sbeval.model_adapters.answers import Stop
from sbeval.model_adapters.batching import DoesNotFit, out_of_memory
from sbeval.model_adapters.generate.slots.fused_blocks import FusedBlocks
from sbeval.model_adapters.generate.slots.graph_capture import GraphCapture
from sbeval.model_adapters.generate.slots.schedule import Continuations, Terms, generate
from sbeval.model_adapters.generate.slots.stepper import ReadPrompt, Stepper, sliding_windows
from sbeval.model_adapters.generate.texts import Continuation, StopSequences, Text, stop_texts
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.prepare.trial import same_logits
from sbeval.model_adapters.self_test.outcome import SLOTS
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Prompt
from sbeval.models import SbevalForCausalLM
from sbeval.models.slots import MOST_QUERIES

logger = logging.getLogger(__name__)

Checked = Generator[tuple[int, Continuation], None, set[int]]
"""Yields the same as `Continuations`, and returns the keys of the texts that were yielded."""

_SCHEMES = ("stickbreaking", "rope", "nope")
_SCHEMES_WITHOUT_WINDOW = ("alibi", "nape")  # a ring buffer does not say how far back a key is
_SETTINGS = {"until", "max_gen_toks", "min_new_tokens"}
_OF_SAMPLING = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
}
_WITHOUT_EFFECT = {
    *("max_length", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("use_cache", "transformers_version", "_from_model_config", "return_dict_in_generate", "length_penalty"),
    *("early_stopping", "renormalize_logits", "disable_compile"),
    *("cache_implementation", "cache_config", "compile_config"),  # slots are the only cache, and nothing is compiled
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
}
_NEUTRAL: dict[str, Any] = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
_SAMPLE_TOKENS = 8
_SAMPLE_TEXTS = 8
_NO_ROOM = (
    "Expected memory beside the model for generating a few tokens, found too little: use dtype=bfloat16, a device with "
    "more memory, or parallelize=True."
)


class GenerationInSlots:
    """Generates the greedy requests of a session in slots."""

    def __init__(self, session: Session) -> None:
        self._session, self._opened = session, session.opened
        self._logged: set[str] = set()

    def serves(self, setting: Mapping[str, Any]) -> bool:
        """Whether requests with this generation setting can run in slots; if not, logs the reason once."""
        check = self._session.self_test.checks.get(SLOTS)
        reason = None if check is None or check.passed else f"an answer from slots was wrong ({check})"
        reason = reason or why_not_setting(self._opened.model, setting) or self._against_model
        if reason is not None and reason not in self._logged:
            self._logged.add(reason)
            logger.warning("generating with transformers' own loop, which is slower: %s", reason)
        return reason is None

    @functools.cached_property
    def _against_model(self) -> str | None:
        if self._session.rope.extrapolation is not None:
            return f"slots hold rotated keys, but extrapolation={self._session.rope.extrapolation} rotates keys anew"
        if self._session.cache is not None:
            return f"slots are a cache of their own, but cache={self._session.cache.choice} is set"
        with self._session.rope.hold(1):
            return why_not_model(self._opened)

    @functools.cached_property
    def _fused_blocks(self) -> FusedBlocks | None:
        if self._session.device.type != "cuda":
            return None
        with self._session.rope.hold(1):
            return fused_blocks(self._opened.model, self._opened.tokenizer)

    @functools.cached_property
    def _graph_capture(self) -> GraphCapture:
        return GraphCapture(self._session.device)

    @functools.cached_property
    def _drafts(self) -> int:
        passed = self._opened.options.draft_tokens
        drafts = min(passed, most_drafts(self._opened.model))
        if drafts < passed:
            logger.warning("draft_tokens=%d is lowered to %d, the most that a step of this model takes", passed, drafts)
        return drafts

    def generate(self, prompts: Sequence[Prompt], read: ReadPrompt | None = None) -> Checked:
        """Yields the answers of prompts whose setting `serves` accepts; `read`, if passed, prefills the only prompt.

        Returns the indices of the prompts that were answered. Some are missing if the check of an answer failed.

        Raises:
            UserError: the check of an answer failed after unchecked answers had been yielded.
        """
        by_index = {prompt.index: prompt for prompt in prompts}
        answered: set[int] = set()
        has_unchecked = False
        results, thrown = self._generate(prompts, read), None
        while True:
            try:
                index, written = next(results) if thrown is None else results.throw(thrown)
            except StopIteration:
                return answered
            thrown, prompt, real = None, by_index[index], self._session.real
            if written.sound and real.needs_slot_check(prompt.length_tokens):
                with self._session.rope.hold(prompt.length_tokens):
                    stands = real.slot_stands(
                        (prompt.tokens, written.tokens),
                        not_early=self._opened.end_token_ids,
                        fewest=prompt.setting.get("min_new_tokens") or 0,
                    )
                if not stands:
                    results.close()
                    if has_unchecked:
                        real.refuse_slots()
                    return answered
            else:
                has_unchecked = True
            answered.add(index)
            try:
                yield index, written
            except Stop as stop:
                thrown = stop

    def _generate(self, prompts: Sequence[Prompt], read: ReadPrompt | None) -> Continuations:
        session, model, tokenizer = self._session, self._opened.model, self._opened.tokenizer
        ends = self._opened.end_token_ids
        terms = Terms(
            # lm-eval also stops at the tokenizer's EOS, which the generation config may not name
            end_tokens=ends if tokenizer.eos_token_id is None else [*ends, tokenizer.eos_token_id],
            not_early=ends,
            limits=session.slots,
            graph_capture=self._graph_capture,
            fused=lambda: self._fused_blocks,
            drafts=self._drafts,
            read=read,
        )
        session.meter.begin()
        written = {repr(prompt.setting["until"]): prompt.setting["until"] for prompt in prompts}
        stops = {name: StopSequences(tokenizer, stop_texts(tokenizer, until)) for name, until in written.items()}
        texts = [
            Text(
                key=prompt.index,
                prompt=prompt.tokens,
                budget_tokens=prompt.setting["max_gen_toks"],
                stops=stops[repr(prompt.setting["until"])],
                fewest_new_tokens=prompt.setting.get("min_new_tokens") or 0,
            )
            for prompt in prompts
        ]
        # all slots of a model share one rotary embedding, so texts are grouped by RoPE frequencies
        frequencies = functools.cache(session.rope.frequencies)
        alike: dict[Hashable, list[Text]] = {}
        for text in sorted(texts, key=lambda text: -text.length_tokens):
            alike.setdefault(frequencies(text.length_tokens), []).append(text)
        for group in alike.values():
            with session.rope.hold(group[0].length_tokens):
                yield from generate(model, group, terms)


def greedy_setting(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a generation setting without entries that have no effect on greedy decoding, such as `num_beams=1`."""
    return {name: value for name, value in setting.items() if name not in _NEUTRAL or _NEUTRAL[name] != value}


def why_not_setting(model: Any, setting: Mapping[str, Any]) -> str | None:
    """Returns why requests with a setting from `normalize_gen_kwargs` cannot run in slots, None if they can."""
    if setting.get("do_sample"):
        return "tokens are sampled"
    if unknown := sorted(set(setting) - _SETTINGS - _OF_SAMPLING):
        return f"the request sets {', '.join(unknown)}"
    config = getattr(model, "generation_config", None)
    in_config = {} if config is None else config.to_diff_dict()
    more = sorted(
        name
        for name, value in in_config.items()
        if name not in _WITHOUT_EFFECT | _OF_SAMPLING and value not in (None, False, 0, [], {}, _NEUTRAL.get(name))
    )
    return f"the model's generation config sets {', '.join(more)}" if more else None


def why_not_model(opened: Opened) -> str | None:
    """Tries a model on a few texts, and returns the reason if it cannot generate in slots; None if it can.

    Raises:
        DoesNotFit: memory does not suffice for the trial.
    """
    model = opened.model
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        return "the model has a PEFT adapter"
    if opened.mixed_precision_dtype is not None:
        return "the model runs in mixed precision"
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.device != model.device for tensor in tensors) or any(hasattr(m, "_hf_hook") for m in model.modules()):
        return "the model is on several devices"
    if isinstance(model, SbevalForCausalLM):
        scheme, has_window = model.config.attention, model.config.sliding_window is not None
        if scheme in _SCHEMES_WITHOUT_WINDOW and has_window:
            return f"attention of the kind {scheme} with a sliding window needs the positions of keys"
        if scheme not in _SCHEMES + _SCHEMES_WITHOUT_WINDOW:
            return f"attention of the kind {scheme} needs the positions of keys"
    elif not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers does not list {name} as running with a static cache"
    if sliding_windows(model) is None:
        return f"{name} caches more than keys and values"
    try:
        same = _same_as_whole(model, opened.tokenizer, None)
    except Exception as error:  # compilers and models can raise anything; transformers' loop then generates
        if out_of_memory(error):
            raise DoesNotFit(_NO_ROOM) from error
        return first_line(error)
    return None if same else f"{name} has other logits in slots than for whole texts"


def most_drafts(model: Any) -> int:
    """Returns the largest number of draft tokens that a decode step of a model can verify.

    It is 0 for models with sliding windows, since a slot keeps only the keys that the newest position sees. For other
    models the attention kernel limits the number of queries for each key head.
    """
    windows = sliding_windows(model) or []
    if not isinstance(model, SbevalForCausalLM) or any(window is not None for window in windows):
        return 0
    config = model.config
    key_heads = config.num_key_value_heads or config.num_attention_heads
    return max(0, MOST_QUERIES // (config.num_attention_heads // key_heads) - 1)


def fused_blocks(model: Any, tokenizer: Any = None) -> FusedBlocks | None:
    """Returns a model's `FusedBlocks`. Returns None, and logs why, if the kernels cannot compute its blocks.

    Raises:
        DoesNotFit: memory does not suffice for the trial.
    """
    try:
        blocks = FusedBlocks.of(model)
        if _same_as_whole(model, tokenizer, blocks):
            return blocks
        reason = "fused blocks have other logits"
    except Exception as error:  # compilers and models can raise anything; the model's own blocks then run
        if out_of_memory(error):
            raise DoesNotFit(_NO_ROOM) from error
        reason = first_line(error)
    logger.warning("decode steps of one text run without fused blocks, which is slower: %s", reason)
    return None


@torch.no_grad()
def _same_as_whole(model: Any, tokenizer: Any, fused: FusedBlocks | None) -> bool:
    """Whether a decode step in slots gives the logits of a forward pass over the whole text, except for rounding.

    With `fused`, one text is tried; otherwise several texts beside a free slot.
    """
    tokens = np.array(sample_tokens(tokenizer, model.get_input_embeddings().weight.shape[0], 2 * _SAMPLE_TOKENS))
    texts, slots = (_SAMPLE_TEXTS, [*range(_SAMPLE_TEXTS, 1, -1), 0]) if fused is None else (1, [0])
    prompts = [tokens[text : text + _SAMPLE_TOKENS - 3 * (text % 2)] for text in range(texts)]
    stepper = Stepper(model, slots=max(slots) + 1, room_tokens=2 * _SAMPLE_TOKENS, most_new_tokens=1, fused=fused)
    stepper.start(slots, prompts, [1] * texts)
    slots_BV = stepper.try_step()
    inputs = [torch.from_numpy(prompt).to(model.device)[None] for prompt in prompts]

    def read() -> Tensor:
        return torch.stack([model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1] for ids in inputs])

    return same_logits(model, read, slots_BV[slots])
