"""`Session`: a prepared model with everything that a request needs, such as batch limits, RoPE and response cache."""

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from lm_eval.api.model import CacheHook
from numpy.typing import NDArray

from sbeval.caches.build import CacheBuilder
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
from sbeval.scoring.through_cache import CacheScorer

logger = logging.getLogger(__name__)

GPU_BATCH_TOKENS = 65536
CPU_BATCH_TOKENS = 8192
_SHARED_SLOTS = 8  # the number of slots of a tensor-parallel model; it may not depend on free memory of a rank


@dataclasses.dataclass(slots=True)
class Meter:
    """Counts the tokens that the model has read, without padding, and the seconds that finished batches took."""

    tokens: int = 0
    seconds: float = 0.0
    _since: float = 0.0

    def begin(self) -> None:
        """Starts the clock for the next batch."""
        self._since = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Counts a finished batch, and starts the clock for the next one."""
        now = time.perf_counter()
        self.tokens += tokens
        self.seconds += now - self._since
        self._since = now

    @property
    def tokens_per_second(self) -> float | None:
        """The average number of tokens per second over the run; None before the first batch is finished."""
        return self.tokens / self.seconds if self.seconds > 0 else None


@dataclasses.dataclass(kw_only=True, slots=True)
class Tally:
    """Counts the answers that this process has generated.

    Attributes:
        chat: whether prompts were written with a chat template.
        answers: the number of answers.
        cut: how many of them used up their token budget without an end token or a stop sequence.
        thinking_cut: how many answers follow thinking that used up its budget and was ended by the adapter.
        thinking_stopped: how many answers follow thinking in which the model generated an end token such as EOS instead
            of the end marker of the thinking.
        thinking_tokens: the number of tokens of thinking.
    """

    chat: bool = False
    answers: int = 0
    cut: int = 0
    thinking_cut: int = 0
    thinking_stopped: int = 0
    thinking_tokens: int = 0

    def add(self, facts: Mapping[str, Any]) -> None:
        """Counts an answer by its facts, such as `answer_cut`."""
        self.answers += 1
        self.cut += facts.get("answer_cut", 0)
        for name in ("thinking_cut", "thinking_stopped", "thinking_tokens"):
            setattr(self, name, getattr(self, name) + facts.get(name, 0))

    def merge(self, other: Self) -> None:
        """Adds the counts of another tally, and warns of cut answers.

        There is no warning of cut answers for base models, which never end their answers.
        """
        for name in ("answers", "cut", "thinking_cut", "thinking_stopped", "thinking_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for count, fault in (
            (other.thinking_cut, "requested before the model had ended its thinking: raise thinking_tokens"),
            (other.thinking_stopped, "requested again because the model ended its text without ending its thinking"),
        ):
            if count:
                logger.warning("%d of %d answers were %s", count, other.answers, fault)
        if other.cut and (self.chat or other.thinking_tokens):
            sentence = "%d of %d answers were cut at their budget: raise it with --gen_kwargs max_gen_toks=..."
            remedy = "" if other.thinking_tokens else ", or pass thinking_tokens=... for a model that thinks"
            logger.warning(sentence + remedy, other.cut, other.answers)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A prepared model with the settings under which it answers requests.

    Attributes:
        opened: the loaded model, its tokenizer and the user's arguments.
        prepared: the changes to the model that stayed.
        scorer: computes log-probabilities of target tokens.
        rope: sets RoPE scaling and extrapolation for each request.
        meter: the tokens that the model has read so far, and the seconds that this took.
        learned_positions: the number of learned position embeddings, None if the model has none.
        batches: limits for lm-eval's own request types; a fixed batch size means as many rows as in `hf`.
        own_batches: limits for this project's request types.
        generation_batches: limits for generation with transformers' `generate`.
        slots: limits for generation in slots.
        batches_ahead: how many batches the device computes while the host reads the scores of one.
        cache_hook: lm-eval's response cache.
        quiet: whether progress bars are hidden, as on every rank but rank 0.
        thinking: budget and end marker of the model's thinking, None if the model only writes answers.
        tally: counts of generated answers.
        real: the outcome of the self-test, and the checks of batches during the evaluation.
        relay: CUDA streams with which the GPUs of a model with pipeline placement compute at the same time, None for
            other models.
        cache: makes the KV cache that the user passed for each text; None without `cache=...`.
        cache_facts: settings of this cache, its bytes a token and the outcome of its test, for the record.
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
    cache: CacheBuilder | None = None
    cache_facts: Mapping[str, Any] | None = None
    begun: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, opened: Opened, prepared: Prepared) -> Self:
        """Returns the session of a causal language model.

        Raises:
            UserError: rope_scaling or extrapolation was passed for a model without rotary embeddings; extrapolation was
                passed together with context_parallel; `max_length` is below one token; or a cache was passed that does
                not suit the model or other arguments.
        """
        if opened.max_length < 1:
            raise UserError(
                f"The model's longest input, max_length, is {opened.max_length} tokens: pass max_length in "
                "--model_args, or correct the checkpoint's configuration."
            )
        model, options, on_cpu = opened.model, opened.options, opened.device.type == "cpu"
        rope = RequestRope(
            model, options.rope_scaling, options.training_length, options.extrapolation, opened.tokenizer
        )
        automatic = opened.batch_size == "auto"
        cache = _cache(opened)
        relay = Relay.of(model) if cache is None else None
        tokens = options.max_batch_tokens or (CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS)
        # a batch size from the user is kept, even 1: in bf16 a matmul with more rows rounds differently
        batches = BatchLimits(
            max_rows=opened.max_batch_size if automatic else int(opened.batch_size),
            max_tokens=tokens if automatic or options.max_batch_tokens else None,
            same_length=rope.by_length,
        )
        if cache is not None:  # each text has a cache of its own
            batches = dataclasses.replace(batches, max_rows=1)
        return cls(
            opened=opened,
            prepared=prepared,
            scorer=_scorer(opened, cache),
            rope=rope,
            learned_positions=learned_positions(model),
            batches=batches,
            own_batches=BatchLimits(max_rows=None if cache is None else 1, max_tokens=tokens, same_length=True),
            generation_batches=batches,
            slots=SlotLimits(
                slots=(_SHARED_SLOTS if opened.shares_model else None) if automatic else int(opened.batch_size),
                most_slots=opened.arguments.get("max_batch_size"),  # not `opened.max_batch_size`, which has a default
                max_tokens=options.max_batch_tokens or (CPU_BATCH_TOKENS if on_cpu and automatic else None),
                prompt_tokens=tokens,
            ),
            batches_ahead=0 if on_cpu else 1 if relay is None else relay.windows,
            relay=relay,
            cache=cache,
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
        """The outcome of the self-test, updated by the checks of batches so far."""
        return self.real.outcome

    def autocast(self) -> torch.autocast:
        """Returns the autocast context in which the model runs, disabled without mixed precision."""
        mixed = self.opened.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None)

    def note_chat(self, text: str, *, begins_answer: bool) -> None:
        """Records that `text` is a prompt from a chat template, and whether it ends inside the model's answer."""
        self.tally.chat = True
        if begins_answer:
            self.begun.add(hash(text))

    def with_cache(self, cache_hook: CacheHook) -> Self:
        """Returns a copy of the session with another response cache."""
        return dataclasses.replace(self, cache_hook=cache_hook)

    def check_tokens(self, requests: Iterable[tuple[str, Iterable[Sequence[int] | NDArray[Any]]]]) -> None:
        """Checks that the model has an embedding for every token, before any request runs.

        `requests` are the names of requests, each with its token sequences.

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
        """Checks that the model has enough learned positions for a request.

        Raises:
            UserError: the request is longer than the model's learned positions.
        """
        if self.learned_positions is not None and length_tokens > self.learned_positions:
            raise UserError(
                f"Expected at most {self.learned_positions} tokens, the number of this model's learned positions, "
                f"found a request of {length_tokens}: ask for shorter contexts or lower max_length in --model_args."
            )


def _cache(opened: Opened) -> CacheBuilder | None:
    """Returns the builder of the caches that the user passed, None without.

    Raises:
        UserError: the cache does not work with the model or with other arguments.
    """
    options = opened.options
    if options.cache is None:
        if options.cache_chunk is not None:
            raise UserError(
                f"cache_chunk={options.cache_chunk} is only for cache=MODULE:FUNCTION: pass cache too, or remove "
                "cache_chunk from --model_args."
            )
        return None
    excluded = {
        "extrapolation": options.extrapolation is not None,
        "context_parallel": options.context_parallel > 1,
        "draft_tokens": options.draft_tokens > 0,
    }
    for name, passed in excluded.items():
        if passed:
            raise UserError(f"cache={options.cache} does not work with {name}: remove one of them from --model_args.")
    return CacheBuilder.of(opened.model, options.cache, chunk_tokens=options.cache_chunk)


def _scorer(opened: Opened, cache: CacheBuilder | None) -> TokenScorer:
    options = opened.options
    if cache is not None:
        return CacheScorer(opened.model, cache, non_finite=options.non_finite)
    if options.context_parallel == 1:
        return TokenScorer(opened.model, non_finite=options.non_finite)
    if options.extrapolation is not None:
        raise UserError(
            f"extrapolation={options.extrapolation} does not work with context_parallel={options.context_parallel}: "
            "remove one of them from --model_args."
        )
    context = join_context(opened.model, options.context_parallel, opened.device)
    return ContextParallelScorer(opened.model, context, non_finite=options.non_finite)
