"""Runs items in batches with a token budget, and halves the budget when memory runs out.

If a batch does not fit into memory, its items run again in batches of half the size, and the smaller budget is kept.
Finished batches are never repeated.
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
    """Memory ran out on one of the ranks that run a model together by tensor parallelism; all ranks must end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """The largest number of rows and of tokens, padding included, in a batch; None for no limit.

    An input with more than `max_tokens` tokens is a batch of its own. With `same_length`, all inputs of a batch have
    the same length.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    same_length: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits:
    """Limits for generation in slots: how many texts are decoded at once, each in one row (slot) of a static KV cache.

    Attributes:
        slots: the number of slots, None for as many as memory and `most_slots` allow.
        most_slots: most slots if `slots` is None.
        max_tokens: most tokens in all slots together, None if only memory limits them.
        prompt_tokens: most tokens of prompts in one prefill, padding included. A longer prompt has its own prefill.
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
    """Yields consecutive batches of `items`, each with the value that `run` returned for it.

    `items` must be sorted by length, longest first. If `run` raises an out-of-memory error, it is called again with
    half the batch. `length_tokens` returns the number of tokens of an item in a batch of one.

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
    """Sets whether ranks run every forward pass together (tensor parallelism), so that no rank may repeat a pass."""
    global _shares_passes
    _shares_passes = shared


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the machine has run out of memory.

    Raises:
        SharedDoesNotFit: memory ran out in a tensor-parallel model. This rank cannot try a smaller batch: the
            all-reduces would add its outputs for that batch to the other ranks' outputs for the larger batch.
    """
    if isinstance(error, SharedDoesNotFit):
        raise error
    ran_out = isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)
    if ran_out and _shares_passes:
        expected = (
            "Expected memory for the passes that the processes of a tensor plan compute together, but it ran out in one"
        )
        remedy = "use a smaller batch_size, a shorter context length, dtype=bfloat16 or more GPUs"
        raise SharedDoesNotFit(f"{expected}: {remedy}.") from error
    return ran_out


@contextlib.contextmanager
def fitting(sentence: str) -> Iterator[None]:
    """Inside this context, turns an out-of-memory error into a `DoesNotFit` with this message.

    Raises:
        DoesNotFit: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise DoesNotFit(sentence) from error
        raise


def free_memory() -> None:
    """Frees the memory that a failed forward pass has left allocated."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
