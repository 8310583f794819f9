"""Batches limited in tokens, halved when memory runs out.

A batch that does not fit is run again in halves, and the smaller limit is kept; finished batches are never run twice.
"""

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from sbeval.errors import UserError

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


_shares_passes = False


class DoesNotFit(UserError):
    """A single input is too large for the memory."""


class SharedDoesNotFit(UserError):
    """Memory ran out in one of the processes that compute together, which ends all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """What a batch may hold at most, None for no limit; tokens count padding, and a longer input runs alone.

    With `same_length`, inputs of different lengths stay in different batches.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    same_length: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits:
    """How many texts are generated side by side: `slots`, or with None as many as memory and `most_slots` allow.

    `max_tokens` are those of all texts together, None for no limit but memory, and `prompt_tokens` those of prompts
    read at once, padding included; a longer prompt is read alone.
    """

    slots: int | None
    most_slots: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int


def run_in_batches(
    items: Sequence[Item],
    run: Callable[[Sequence[Item]], Result],
    *,
    length_tokens: Callable[[Item], int],
    limits: BatchLimits,
) -> Generator[tuple[Sequence[Item], Result], None, None]:
    """Yields consecutive batches of `items`, which are sorted by length, longest first, each with what `run` returned.

    `run` is called again with a smaller batch if it raises an out-of-memory error. `length_tokens` is the length of an
    item run alone, padding included.

    Raises:
        DoesNotFit: a single item is too large for the memory.
    """
    start, max_tokens = 0, limits.max_tokens
    while start < len(items):
        longest = length_tokens(items[start])
        rows = len(items) - start
        if limits.max_rows is not None:
            rows = min(rows, limits.max_rows)
        if max_tokens is not None:
            rows = min(rows, max_tokens // longest)
        batch = items[start : start + max(1, rows)]
        if limits.same_length:
            batch = [item for item in batch if length_tokens(item) == longest]
        try:
            result = run(batch)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        else:
            start += len(batch)
            yield batch, result
            continue
        free_memory()
        if len(batch) == 1:
            expected = f"Expected an input of {longest} tokens to fit into memory"
            remedy = "use a shorter context length, dtype=bfloat16, a device with more memory, or parallelize=True"
            raise DoesNotFit(f"{expected}, but it ran out with this input alone: {remedy}.")
        max_tokens = longest * (len(batch) // 2)
        logger.warning("out of memory with %d inputs of %d tokens: going on with half as many", len(batch), longest)


def share_passes(shared: bool) -> None:
    """Says whether other processes take part in each pass of the model, so that none may be run again by one alone."""
    global _shares_passes
    _shares_passes = shared


def out_of_memory(error: BaseException) -> bool:
    """Returns whether a device or the machine had no memory left.

    Raises:
        SharedDoesNotFit: it had not, and this process cannot try anything else: the others would add up what it
            computes then with what they are at.
    """
    if isinstance(error, SharedDoesNotFit):
        raise error
    ran_out = isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)
    if ran_out and _shares_passes:
        expected = "Expected memory for what the processes of a tensor plan compute together, but it ran out in one"
        remedy = "use a smaller batch_size, a shorter context length, dtype=bfloat16 or more GPUs"
        raise SharedDoesNotFit(f"{expected}: {remedy}.") from error
    return ran_out


@contextlib.contextmanager
def fitting(sentence: str) -> Iterator[None]:
    """Says that something does not fit where memory runs out within it.

    Raises:
        DoesNotFit: with this sentence.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise DoesNotFit(sentence) from error
        raise


def free_memory() -> None:
    """Frees memory that failed work has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
