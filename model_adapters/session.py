"""`Session`: a prepared model with what every request needs, from batch limits and RoPE to the response cache."""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from lm_eval.api.model import CacheHook
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.model_adapters.batching import BatchLimits, SlotLimits
from sbeval.model_adapters.generate.thinking import Thinking
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.prepare.prepared import Prepared
from sbeval.model_adapters.prepare.spread import Relay
from sbeval.model_adapters.rope import RequestRope
from sbeval.model_adapters.self_test.outcome import Outcome
from sbeval.model_adapters.self_test.real import RealBatches
from sbeval.models.learned_positions import learned_positions
from sbeval.processes import ranks
from sbeval.scoring.context_parallel import ContextParallelScorer, join_context
from sbeval.scoring.scorer import TokenScorer

logger = logging.getLogger(__name__)

GPU_BATCH_TOKENS = 65536
CPU_BATCH_TOKENS = 8192
_SHARED_SLOTS = 8  # of processes with a tensor plan, which may not count on equal memory


@dataclasses.dataclass(slots=True)
class Meter:
    """Adds up the tokens the model has read, without padding, and the seconds of finished batches."""

    tokens: int = 0
    seconds: float = 0.0
    _since: float = 0.0

    def begin(self) -> None:
        """Counts the time of the next batch from now."""
        self._since = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Adds a finished batch, and counts the time of the next from now."""
        now = time.perf_counter()
        self.tokens += tokens
        self.seconds += now - self._since
        self._since = now

    @property
    def tokens_per_second(self) -> float | None:
        """Average over the run; None before anything has run."""
        return self.tokens / self.seconds if self.seconds > 0 else None


@dataclasses.dataclass(kw_only=True, slots=True)
class Tally:
    """Counts generated answers of this process.

    Attributes:
        chat: whether prompts were written with a chat template.
        cut: those that took all of their budget without an end.
        thinking_cut: those before which the thinking had taken its budget and had to be ended.
        thinking_stopped: those before which the model ended the text without an end of its thinking.
        thinking_tokens: tokens of thinking.
    """

    chat: bool = False
    answers: int = 0
    cut: int = 0
    thinking_cut: int = 0
    thinking_stopped: int = 0
    thinking_tokens: int = 0

    def add(self, facts: Mapping[str, Any]) -> None:
        """Counts an answer with its facts, such as `answer_cut`."""
        self.answers += 1
        self.cut += facts.get("answer_cut", 0)
        for name in ("thinking_cut", "thinking_stopped", "thinking_tokens"):
            setattr(self, name, getattr(self, name) + facts.get(name, 0))

    def merge(self, other: Self) -> None:
        """Adds another tally and warns of cut answers, except those of base models, which never end their answers."""
        for name in ("answers", "cut", "thinking_cut", "thinking_stopped", "thinking_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for count, fault in (
            (other.thinking_cut, "asked for before the model had ended its thinking: raise thinking_tokens"),
            (other.thinking_stopped, "asked for again: the model had ended its text without an end of its thinking"),
        ):
            if count:
                logger.warning("%d of %d answers were %s", count, other.answers, fault)
        if other.cut and (self.chat or other.thinking_tokens):
            sentence = "%d of %d answers were cut at their budget: raise it with --gen_kwargs max_gen_toks=..."
            remedy = "" if other.thinking_tokens else ", or pass thinking_tokens=... for a model that thinks"
            logger.warning(sentence + remedy, other.cut, other.answers)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A prepared model, and the settings under which it answers requests.

    Attributes:
        opened: the loaded model, its tokenizer and the user's arguments.
        prepared: the changes to the model that stayed.
        scorer: log-probabilities of targets.
        rope: the RoPE scaling and the extrapolation of each request.
        meter: tokens that the model has read so far, and the seconds that this took.
        learned_positions: the number of learned positions, None if positions are not learned.
        batches: limits for lm-eval's own requests; as many rows as in `hf`.
        own_batches: limits for this project's requests.
        generation_batches: limits where transformers' own loop generates.
        slots: limits where texts are generated side by side.
        batches_ahead: how many batches the device computes while the host reads the scores of one.
        cache_hook: lm-eval's response cache.
        quiet: whether progress bars are hidden, as in every process but the first.
        thinking: the budget and the end of a model's thinking, None where the model writes answers alone.
        tally: counts of generated answers.
        real: the ways in which the model may be run, and the checked batches of the run.
        relay: streams with which several GPUs work at once if layers are spread over them, None for other models.
        begun: hashes of the chat prompts that end inside the model's answer.
    """

    opened: Opened
    prepared: Prepared
    scorer: TokenScorer
    rope: RequestRope
    meter: Meter = dataclasses.field(default_factory=Meter)
    learned_positions: int | None
    batches: BatchLimits
    own_batches: BatchLimits
    generation_batches: BatchLimits
    slots: SlotLimits
    batches_ahead: int
    cache_hook: CacheHook
    quiet: bool
    thinking: Thinking | None = None
    tally: Tally = dataclasses.field(default_factory=Tally)
    real: RealBatches = dataclasses.field(default_factory=RealBatches)
    relay: Relay | None = None
    begun: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, opened: Opened, prepared: Prepared) -> Self:
        """Returns the session of a causal language model.

        Raises:
            UserError: rope_scaling or extrapolation without rotary embeddings, extrapolation together with
                context_parallel, or no room for a token by configuration and tokenizer.
        """
        if opened.max_length < 1:
            expected = "Expected a model that takes at least one token"
            remedy = "pass max_length in --model_args, or correct the checkpoint's configuration"
            raise UserError(f"{expected}, found a longest input of {opened.max_length}: {remedy}.")
        model, options, on_cpu = opened.model, opened.options, opened.device.type == "cpu"
        rope = RequestRope(
            model, options.rope_scaling, options.training_length, options.extrapolation, opened.tokenizer
        )
        automatic = opened.batch_size == "auto"
        relay = Relay.of(model)
        tokens = options.max_batch_tokens or (CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS)
        batches = BatchLimits(
            max_rows=opened.max_batch_size if automatic else int(opened.batch_size),
            max_tokens=tokens if automatic or options.max_batch_tokens else None,
            same_length=rope.by_length,
        )
        return cls(
            opened=opened,
            prepared=prepared,
            scorer=_scorer(opened),
            rope=rope,
            learned_positions=learned_positions(model),
            batches=batches,
            own_batches=BatchLimits(max_rows=None, max_tokens=tokens, same_length=True),
            generation_batches=batches,
            slots=SlotLimits(
                slots=(_SHARED_SLOTS if opened.shares_model else None) if automatic else int(opened.batch_size),
                most_slots=opened.arguments.get("max_batch_size"),  # `max_batch_size` of `hf` has a default
                max_tokens=options.max_batch_tokens or (CPU_BATCH_TOKENS if on_cpu and automatic else None),
                prompt_tokens=tokens,
            ),
            batches_ahead=0 if on_cpu else 1 if relay is None else relay.windows,
            relay=relay,
            cache_hook=CacheHook(None),
            quiet=not ranks.is_first_process(),
            thinking=None if options.thinking_tokens is None else Thinking.of(opened, options.thinking_tokens),
        )

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return self.opened.device

    @property
    def max_length(self) -> int:
        """Most tokens of an lm-eval request, including those to generate."""
        return self.opened.max_length

    @property
    def self_test(self) -> Outcome:
        """The ways in which the model may be run, by now."""
        return self.real.outcome

    def autocast(self) -> torch.autocast:
        """Returns the context in which the model runs."""
        mixed = self.opened.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None)

    def note_chat(self, text: str, *, begins_answer: bool) -> None:
        """Notes that prompts come from a chat template, and which of them end inside the model's answer."""
        self.tally.chat = True
        if begins_answer:
            self.begun.add(hash(text))

    def with_cache(self, cache_hook: CacheHook) -> Self:
        """Returns the session with another response cache."""
        return dataclasses.replace(self, cache_hook=cache_hook)

    def check_tokens(self, requests: Iterable[tuple[str, Iterable[Sequence[int] | NDArray[Any]]]]) -> None:
        """Checks that the model has an embedding for every token, before any request runs.

        `requests` are names of requests, each with its token sequences.

        Raises:
            UserError: a token has no embedding; the message names the request.
        """
        embeddings = self.opened.embeddings
        for name, sequences in requests:
            for tokens in sequences:
                highest = int(tokens.max() if isinstance(tokens, np.ndarray) else max(tokens)) if len(tokens) else 0
                if highest >= embeddings:
                    raise UserError(
                        f"Expected token ids below {embeddings}, the number of the model's embeddings, found {highest} "
                        f"in {name}: remove the text of this token, or pass the tokenizer this model was trained "
                        "with as tokenizer=... in --model_args."
                    )

    def check_positions(self, length_tokens: int) -> None:
        """Checks that the model has positions for a request.

        Raises:
            UserError: the request is longer than the model's learned positions.
        """
        if self.learned_positions is not None and length_tokens > self.learned_positions:
            raise UserError(
                f"Expected at most {self.learned_positions} tokens, the number of this model's learned positions, "
                f"found a request of {length_tokens}: ask for shorter contexts or lower max_length in --model_args."
            )


def _scorer(opened: Opened) -> TokenScorer:
    options = opened.options
    if options.context_parallel == 1:
        return TokenScorer(opened.model, non_finite=options.non_finite)
    if options.extrapolation is not None:
        expected = f"Expected no extrapolation beside context_parallel={options.context_parallel}"
        raise UserError(f"{expected}, found {options.extrapolation}: remove one of them from --model_args.")
    context = join_context(opened.model, options.context_parallel, opened.device)
    return ContextParallelScorer(opened.model, context, non_finite=options.non_finite)
