"""Greedy requests of lm-eval, generated in slots."""

import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from sbeval.model_adapters.decoding.fused_blocks import FusedBlocks
from sbeval.model_adapters.decoding.recording import Recording
from sbeval.model_adapters.decoding.schedule import Terms, generate
from sbeval.model_adapters.decoding.served import fused_blocks, most_drafts, why_not_model, why_not_setting
from sbeval.model_adapters.decoding.stepper import ReadPrompt
from sbeval.model_adapters.decoding.stops import StopSequences
from sbeval.model_adapters.decoding.texts import Answer, Text, answer_text, no_text, stop_texts
from sbeval.model_adapters.session import GPU_BATCH_TOKENS, Session
from sbeval.model_adapters.truncation import Prompt

logger = logging.getLogger(__name__)
Give = Callable[[str, Sequence[int]], None]


class GenerationInSlots:
    """Greedy requests, generated side by side in slots.

    Args:
        session: of the model.
        hf: lm-eval's Hugging Face model.
    """

    def __init__(self, session: Session, hf: Any) -> None:
        self._session, self._hf = session, hf
        self._said: set[str] = set()

    def serves(self, setting: Mapping[str, Any]) -> bool:
        """Whether requests with a setting can be generated in slots; if not, the log says why, once."""
        reason = why_not_setting(self._hf.model, setting) or self._against_model
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            logger.warning("generating with transformers' own loop, which is slower: %s", reason)
        return reason is None

    @functools.cached_property
    def _against_model(self) -> str | None:
        if self._session.rope.extrapolation is not None:
            return f"slots keep rotated keys, and extrapolation={self._session.rope.extrapolation} rotates keys again"
        with self._session.rope.hold(1):
            return why_not_model(self._hf)

    @functools.cached_property
    def _fused_blocks(self) -> FusedBlocks | None:
        if self._session.device.type != "cuda":
            return None
        with self._session.rope.hold(1):
            return fused_blocks(self._hf.model)

    @functools.cached_property
    def _recording(self) -> Recording:
        return Recording(self._session.device)

    @functools.cached_property
    def _drafts(self) -> int:
        drafts = min(self._session.draft_tokens, most_drafts(self._hf.model))
        if drafts < self._session.draft_tokens:
            logger.warning("draft_tokens=%d: steps of this model take %d", self._session.draft_tokens, drafts)
        return drafts

    def generate(
        self,
        same: Mapping[int, Sequence[int]],
        prompts: Sequence[Prompt],
        settings: Sequence[Mapping[str, Any]],
        give: Give,
        read: ReadPrompt | None = None,
    ) -> None:
        """Generates the answers of requests that `serves` accepts.

        Args:
            same: indices of requests to run, each with the indices of all requests that have its answer.
            prompts: of all requests.
            settings: of all requests, as `normalize_gen_kwargs` returns them.
            give: takes an answer and the indices of its requests; raises if there is no answer and that is an error.
            read: reads the prompt, when all requests share one; None has the model read prompts.
        """
        session, hf = self._session, self._hf
        ends = hf.model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        terms = Terms(
            # lm-eval also stops at the tokenizer's end of text, which a generation config need not name
            end_tokens=ends if hf.eot_token_id is None else [*ends, hf.eot_token_id],
            not_early=ends,
            slots=session.slots,
            most_slots=session.most_slots,
            most_tokens=session.slot_tokens,
            prompt_tokens=session.own_batches.max_tokens or GPU_BATCH_TOKENS,
            recording=self._recording,
            fused=lambda: self._fused_blocks,
            drafts=self._drafts,
            read=read,
        )
        started = time.perf_counter()

        def finish(text: Text, answer: Answer) -> None:
            nonlocal started
            now = time.perf_counter()
            session.meter.add(len(text.prompt), now - started)
            started = now
            if answer.sound:
                words = answer_text(hf.tokenizer, answer.tokens, text.stops.texts, hf.think_end_token)
            else:
                words = no_text(len(text.prompt), len(answer.tokens))
            give(words, same[text.key])

        written = {repr(settings[index]["until"]): settings[index]["until"] for index in same}
        stops = {name: StopSequences(hf.tokenizer, stop_texts(hf, until)) for name, until in written.items()}
        texts = [
            Text(
                key=index,
                prompt=prompts[index].tokens,
                budget_tokens=prompts[index].budget_tokens,
                stops=stops[repr(settings[index]["until"])],
                fewest_new_tokens=settings[index].get("min_new_tokens") or 0,
            )
            for index in same
        ]
        # all slots of a model use one set of frequencies at a time
        frequencies = functools.cache(session.rope.frequencies)
        alike: dict[Hashable, list[Text]] = {}
        for text in sorted(texts, key=lambda text: -text.length_tokens):
            alike.setdefault(frequencies(text.length_tokens), []).append(text)
        for group in alike.values():
            with session.rope.hold(group[0].length_tokens):
                generate(hf.model, group, terms, finish)
