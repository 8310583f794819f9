"""Which prompts run when: in as many slots as memory holds; a finished text frees its slot for the next."""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sbeval.model_adapters.batching import DoesNotFit, free_memory, out_of_memory
from sbeval.model_adapters.decoding.fused_blocks import FusedBlocks
from sbeval.model_adapters.decoding.prompts import PromptReader
from sbeval.model_adapters.decoding.recording import Recording
from sbeval.model_adapters.decoding.stepper import ReadPrompt, Stepper, sliding_windows
from sbeval.model_adapters.decoding.texts import Answer, Text
from sbeval.model_adapters.decoding.written import Written

logger = logging.getLogger(__name__)

STEPS_BETWEEN_LOOKS = 16
"""Steps between two looks at the new tokens; each look waits for the device."""
MOST_SLOTS = 256
SHARE_OF_MEMORY = 0.6
"""Share of the free memory for keys and values; the rest is for reading prompts."""
_FEWEST_ROOM_TOKENS = 256
_ROOM_MULTIPLE = 64
_FEWEST_STEPS_TO_CAPTURE = 8
_PROMPT_TOKENS_WORTH_A_PASS = 8192
_TEXTS_WORTH_A_LATE_LOOK = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """How texts are generated.

    Attributes:
        end_tokens: tokens that end an answer.
        not_early: tokens that are not chosen before a text has its `fewest_new_tokens`.
        slots: most texts at a time, None for as many as memory holds.
        most_slots: upper limit if `slots` is None; None for `MOST_SLOTS`.
        most_tokens: most tokens of all slots together, None for no limit but memory.
        prompt_tokens: most tokens of prompts read at once, padding included; a longer one is read alone.
        recording: records steps.
        fused: returns the model's blocks for steps of one slot, None if it has none; called when they are needed.
        drafts: most tokens looked up in a text for each step.
        read: reads the only prompt; None has the model read prompts.
    """

    end_tokens: Sequence[int]
    not_early: Sequence[int]
    slots: int | None
    most_tokens: int | None
    prompt_tokens: int
    recording: Recording
    most_slots: int | None = None
    fused: Callable[[], FusedBlocks | None] = lambda: None
    drafts: int = 0
    read: ReadPrompt | None = None


Give = Callable[[Text, Answer], None]


def generate(model: Any, texts: Sequence[Text], terms: Terms, give: Give) -> None:
    """Continues every text greedily, and gives each its answer when it is done.

    Args:
        model: one for which `served.why_not_model` returns None.
        texts: what to continue; texts of about the same length share slots of one size.
        terms: limits, end tokens and parts of the model.
        give: takes a text and its answer. Of answers found in one look, unsound ones come last.

    Raises:
        DoesNotFit: one text alone is too large for the memory.
    """
    waiting = sorted(texts, key=lambda text: -text.length_tokens)
    while waiting:
        longest = waiting[0].length_tokens
        slots = _most_slots(model, _room(longest), terms)
        alike = waiting
        if slots < len(waiting):  # shorter texts run later, in more slots
            alike = [text for text in waiting if _size_class(text.length_tokens) == _size_class(longest)]
        waiting = waiting[len(alike) :]
        _generate_alike(model, alike, min(slots, len(alike)), terms, give)


def _size_class(length_tokens: int) -> int:
    return max(_FEWEST_ROOM_TOKENS, 1 << (length_tokens - 1).bit_length())


def _room(longest_tokens: int) -> int:
    return -(-longest_tokens // _ROOM_MULTIPLE) * _ROOM_MULTIPLE


def _generate_alike(model: Any, texts: Sequence[Text], slots: int, terms: Terms, give: Give) -> None:
    longest = texts[0].length_tokens
    todo = {text.key: text for text in texts}

    def finish(text: Text, answer: Answer) -> None:
        del todo[text.key]
        give(text, answer)

    while todo:
        slots = min(slots, len(todo))
        try:
            _run(model, list(todo.values()), slots, _room(longest), terms, finish)
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        free_memory()
        if slots == 1:
            raise DoesNotFit(
                f"Expected a prompt and an answer of {longest} tokens to fit into memory, but it ran out with this one "
                "alone: use a shorter context length, dtype=bfloat16, a device with more memory, or parallelize=True."
            )
        slots //= 2
        logger.warning("out of memory while generating: going on with %d texts at a time", slots)


def _run(model: Any, texts: list[Text], slots: int, room: int, terms: Terms, give: Give) -> None:
    """Generates in slots of one size until every text is done.

    Raises:
        OutOfMemoryError: memory ran out; texts keep the tokens they have.
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
        stepper.capture(terms.recording)
    waiting = deque(sorted(texts, key=lambda text: -len(text.so_far)))
    reader = PromptReader(stepper, waiting, terms.prompt_tokens)
    running: dict[int, Text] = {}
    left = dict.fromkeys(range(slots), 0)  # most tokens still to write
    behind: tuple[Written, dict[int, Text]] | None = None

    def look(written: Written, texts_then: dict[int, Text]) -> None:
        done: list[tuple[Text, Answer]] = []
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
                sound = sound_tokens is None or sound_tokens >= len(tokens[:end])
                done.append((text, Answer(tokens=tokens[: end if sound else sound_tokens], sound=sound)))
        for text, answer in sorted(done, key=lambda pair: not pair[1].sound):
            give(text, answer)

    while waiting or running:
        free = [slot for slot in range(slots) if slot not in running]
        if waiting and _worth_reading(len(waiting[0].so_far), len(free), slots, len(waiting)):
            for slot, text in reader.read(free, alone=not running):
                running[slot], left[slot] = text, text.budget_tokens - len(text.answer)
        steps = min(STEPS_BETWEEN_LOOKS, max(left[slot] for slot in running))
        before, behind = behind, None
        fits = True
        if steps:
            fits = _fits(stepper, steps)
            left = {slot: max(0, tokens - steps) for slot, tokens in left.items()}
            behind = stepper.written(), dict(running)
        if before is not None:
            look(*before)
        # looking at many texts takes the host a while: give the device its next steps first
        late = fits and model.device.type == "cuda" and len(running) >= _TEXTS_WORTH_A_LATE_LOOK
        if behind is not None and not late:
            look(*behind)
            behind = None
        if not fits:
            raise torch.OutOfMemoryError("out of memory in a step")


def _fits(stepper: Stepper, steps: int) -> bool:
    """Takes steps and returns whether memory sufficed for all of them."""
    try:
        stepper.run(steps)
        return True
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    free_memory()
    return False


def _worth_reading(prompt_tokens: int, free: int, slots: int, waiting: int) -> bool:
    """Whether to read prompts now: reading a few short ones takes as long as reading many."""
    if free == 0:
        return False
    return free * prompt_tokens >= _PROMPT_TOKENS_WORTH_A_PASS or free >= min(waiting, -(-slots // 4))


def _most_slots(model: Any, room: int, terms: Terms) -> int:
    """How many texts may run at a time."""
    most = terms.slots or min(MOST_SLOTS, terms.most_slots or MOST_SLOTS)
    if terms.most_tokens is not None:
        most = min(most, terms.most_tokens // room)
    if terms.slots is None and model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        kept = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        most = min(most, int(SHARE_OF_MEMORY * (free + kept)) // slot_bytes(model, room))
    return max(1, most)


def slot_bytes(model: Any, room_tokens: int) -> int:
    """Returns the memory of a slot's keys and values."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = sliding_windows(model) or []
    tokens = sum(min(room_tokens, window or room_tokens) for window in windows)
    return int(2 * heads * head_dim * tokens * model.dtype.itemsize)
