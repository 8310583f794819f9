"""Schedules prompts: prefills them into as many slots as fit into memory, and reuses the slot of a finished text.

A slot is one row of a static KV cache. Many prompts are prefilled in one batch, or a single prompt in chunks if memory
is short.
"""

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from sbeval.model_adapters.answers import handed_over
from sbeval.model_adapters.batching import DoesNotFit, SlotLimits, free_memory, out_of_memory
from sbeval.model_adapters.generate.slots.fused_blocks import FusedBlocks
from sbeval.model_adapters.generate.slots.graph_capture import GraphCapture
from sbeval.model_adapters.generate.slots.stepper import ReadPrompt, Stepper, Written, sliding_windows
from sbeval.model_adapters.generate.texts import Continuation, Text

logger = logging.getLogger(__name__)

STEPS_BETWEEN_LOOKS = 16
"""The number of decode steps after which the host reads the new tokens. Each time it waits for the device."""
MOST_SLOTS = 256
SHARE_OF_MEMORY = 0.6
"""The fraction of free memory that the KV cache of all slots may take; the rest is for prefills."""
FEWEST_CHUNK_TOKENS = 256
_FEWEST_ROOM_TOKENS = 256
_ROOM_MULTIPLE = 64
_FEWEST_STEPS_TO_CAPTURE = 8
_PROMPT_TOKENS_WORTH_A_PASS = 8192
_TEXTS_WORTH_A_LATE_LOOK = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The settings that all texts of one call of `generate` share.

    Attributes:
        not_early: tokens that are not chosen before an answer has `Text.fewest_new_tokens` tokens.
        fused: returns the model's `FusedBlocks`, None if it has none. Called only for a single slot without drafts.
        drafts: the largest number of draft tokens (prompt lookup decoding) in each step.
        read: prefills the only prompt, with context parallelism; None if the model's own forward prefills prompts.
    """

    end_tokens: Sequence[int]
    not_early: Sequence[int]
    limits: SlotLimits
    graph_capture: GraphCapture
    fused: Callable[[], FusedBlocks | None] = lambda: None
    drafts: int = 0
    read: ReadPrompt | None = None


Continuations = Generator[tuple[int, Continuation], None, None]
"""Yields the key of each text with its generated tokens as soon as they are complete."""


def generate(model: Any, texts: Sequence[Text], terms: Terms) -> Continuations:
    """Continues every text greedily, in slots that are shared by texts of about the same length.

    Raises:
        DoesNotFit: a single text is too large for the memory.
    """
    waiting = sorted(texts, key=lambda text: -text.length_tokens)
    while waiting:
        longest = waiting[0].length_tokens
        slots = _most_slots(model, _room(longest), terms.limits)
        similar = waiting
        if slots < len(waiting):  # shorter texts run in a later call: more slots of their size fit into memory
            similar = [text for text in waiting if _size_class(text.length_tokens) == _size_class(longest)]
        waiting = waiting[len(similar) :]
        yield from _generate_alike(model, similar, slots, terms)


def _size_class(length_tokens: int) -> int:
    return max(_FEWEST_ROOM_TOKENS, 1 << (length_tokens - 1).bit_length())


def _room(longest_tokens: int) -> int:
    return -(-longest_tokens // _ROOM_MULTIPLE) * _ROOM_MULTIPLE


def _generate_alike(model: Any, texts: Sequence[Text], slots: int, terms: Terms) -> Continuations:
    longest = texts[0].length_tokens
    while todo := [text for text in texts if not text.done]:
        slots = min(slots, len(todo))
        try:
            yield from _run(model, todo, slots, _room(longest), terms)
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        free_memory()
        if slots == 1:
            expected = f"Expected a prompt and an answer of {longest} tokens to fit into memory"
            remedy = "use a shorter context length, dtype=bfloat16, a device with more memory, or parallelize=True"
            raise DoesNotFit(f"{expected}, but it ran out with this one alone: {remedy}.")
        slots //= 2
        logger.warning("out of memory while generating: going on with %d texts at a time", slots)


def _run(model: Any, texts: list[Text], slots: int, room: int, terms: Terms) -> Continuations:
    """Generates all texts with a fixed number of slots.

    Raises:
        OutOfMemoryError: memory ran out; `texts` keep the tokens that were generated until then.
    """
    most_new_tokens = max(text.budget_tokens for text in texts)
    stepper = Stepper(
        model,
        slots=slots,
        room_tokens=room,
        most_new_tokens=most_new_tokens,
        end_tokens=terms.end_tokens,
        not_early=terms.not_early if any(text.fewest_new_tokens for text in texts) else (),
        fused=terms.fused() if slots == 1 and not terms.drafts else None,
        drafts=terms.drafts,
        read=terms.read,
    )
    steps = most_new_tokens * -(-len(texts) // slots)
    if steps >= _FEWEST_STEPS_TO_CAPTURE:
        stepper.capture(terms.graph_capture)
    waiting = deque(sorted(texts, key=lambda text: -len(text.so_far)))
    reader = PromptReader(stepper, waiting, terms.limits.prompt_tokens)
    running: dict[int, Text] = {}
    tokens_left = dict.fromkeys(range(slots), 0)  # most tokens that each slot may still generate
    unread: tuple[Written, dict[int, Text]] | None = None

    def look(written: Written, texts_then: dict[int, Text]) -> list[tuple[int, Continuation]]:
        complete = []
        for slot, text in texts_then.items():
            if running.get(slot) is not text:
                continue
            new, goes_on, sound_tokens = written.of(slot)
            tokens = text.answer
            looked = len(tokens)
            tokens += new
            end = text.stops.end(tokens, looked)
            if end is not None or not goes_on:
                stepper.drop(slot)
                del running[slot]
                text.done = True
                sound = sound_tokens is None or sound_tokens >= len(tokens[:end])
                complete.append((text.key, Continuation(tokens[: end if sound else sound_tokens], sound)))
        return complete

    try:
        while waiting or running:
            free = [slot for slot in range(slots) if slot not in running]
            if waiting and _worth_reading(len(waiting[0].so_far), len(free), slots, len(waiting)):
                for slot, text in reader.read(free, alone=not running):
                    running[slot], tokens_left[slot] = text, text.budget_tokens - len(text.answer)
            steps = min(STEPS_BETWEEN_LOOKS, max(tokens_left[slot] for slot in running))
            before, unread = unread, None
            fits = True
            if steps:
                fits = _fits(stepper, steps)
                tokens_left = {slot: max(0, tokens - steps) for slot, tokens in tokens_left.items()}
                unread = stepper.written(), dict(running)
            if before is not None:
                yield from handed_over(look(*before))
            # the host needs long to process the tokens of many texts, so it queues the next steps before that
            late = fits and model.device.type == "cuda" and len(running) >= _TEXTS_WORTH_A_LATE_LOOK
            if unread is not None and not late:
                now, unread = unread, None
                yield from handed_over(look(*now))
            if not fits:
                raise torch.OutOfMemoryError("out of memory in a decode step")
    except GeneratorExit:
        raise
    except BaseException:
        if unread is not None:
            with contextlib.suppress(Exception):  # only the first error is reported
                yield from handed_over(look(*unread))
        raise


def _fits(stepper: Stepper, steps: int) -> bool:
    """Runs decode steps, and returns whether memory sufficed for all of them."""
    try:
        stepper.run(steps)
        return True
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    free_memory()
    return False


def _worth_reading(prompt_tokens: int, free: int, slots: int, waiting: int) -> bool:
    """Whether to prefill now; else to wait for more free slots, since a few short prompts take as long as many."""
    if free == 0:
        return False
    return free * prompt_tokens >= _PROMPT_TOKENS_WORTH_A_PASS or free >= min(waiting, -(-slots // 4))


def _most_slots(model: Any, room: int, limits: SlotLimits) -> int:
    """Returns the largest number of slots that memory and the limits allow; `room` is the tokens of a slot."""
    most = limits.slots or min(MOST_SLOTS, limits.most_slots or MOST_SLOTS)
    if limits.max_tokens is not None:
        most = min(most, limits.max_tokens // room)
    if limits.slots is None and model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        most = min(most, int(SHARE_OF_MEMORY * (free + cached)) // slot_bytes(model, room))
    return max(1, most)


def slot_bytes(model: Any, room_tokens: int) -> int:
    """Returns the bytes of the keys and values in one slot with room for `room_tokens` tokens."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = sum(min(room_tokens, window or room_tokens) for window in sliding_windows(model) or [])
    return int(2 * heads * head_dim * tokens * model.dtype.itemsize)


class PromptReader:
    """Prefills prompts into free slots, longest first, in batches of at most `prompt_tokens`, padding included.

    A longer prompt is a batch of its own. If memory runs out, the limit is halved for all later prefills: batches get
    fewer prompts, and finally a single prompt is read in chunks. Chunks are the last resort because a transformers
    model needs a mask for every chunk but the first. If memory does not suffice for the smallest chunk, prefills wait
    until the texts in other slots are complete. No token is generated twice.
    """

    def __init__(self, stepper: Stepper, waiting: deque[Text], prompt_tokens: int) -> None:
        self._stepper, self._waiting = stepper, waiting
        self._at_once_tokens = max(prompt_tokens, *(len(text.so_far) for text in waiting))
        self._full = False

    def read(self, free: Sequence[int], *, alone: bool) -> list[tuple[int, Text]]:
        """Prefills prompts into free slots while memory suffices, and returns these slots with their texts.

        Args:
            free: the free slots.
            alone: whether no text is being generated, so that waiting would free no memory.

        Raises:
            RuntimeError: memory ran out for the smallest chunk of one prompt, and `alone` is true.
        """
        started: list[tuple[int, Text]] = []
        while self._waiting and len(started) < len(free) and (alone or not self._full):
            longest = len(self._waiting[0].so_far)
            rows = min(max(1, self._at_once_tokens // longest), len(self._waiting), len(free) - len(started))
            chosen = [self._waiting[row] for row in range(rows)]
            slots = list(free[len(started) : len(started) + rows])
            try:
                self._stepper.start(
                    slots,
                    [text.so_far for text in chosen],
                    [text.budget_tokens for text in chosen],
                    fewest_tokens=[text.fewest_new_tokens for text in chosen],
                    answered_tokens=[len(text.answer) for text in chosen],
                    chunk_tokens=self._at_once_tokens // rows,
                )
            except (RuntimeError, MemoryError) as error:
                fewer = min(self._at_once_tokens, rows * longest) // 2
                smallest = rows == 1 and fewer < FEWEST_CHUNK_TOKENS
                if not out_of_memory(error) or (smallest and alone and not started):
                    raise
            else:
                started += zip(slots, (self._waiting.popleft() for _ in range(rows)), strict=True)
                continue
            free_memory()
            if smallest:
                self._full = True
                break
            self._at_once_tokens = fewer
            logger.warning("out of memory in a prefill: going on with %d tokens at once", fewer)
        return started
