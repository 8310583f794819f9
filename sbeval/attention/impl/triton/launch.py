"""Launch parameters as plain functions of the problem's sizes, so that they can be tested and tuned without a GPU."""

import dataclasses
import functools

LOG2_E = 1.4426950408889634

# shared memory for one program on an H100 or H200; an A100 has less, and consumer GPUs less than half
ROOMY_SHARED_MEMORY_BYTES = 227 * 1024

# several waves of programs over all multiprocessors; with fewer, many would be idle while the last long rows run
PROGRAMS_TOGETHER = 2048

# L2 cache of an H200; an H100 has 50 MiB, and slower memory
ROOMY_CACHE_BYTES = 60 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchParameters:
    """Compile-time and launch parameters of the forward or backward kernel.

    Attributes:
        block_queries: queries of a program.
        block_keys: keys of a tile.
        block_head_dim: head_dim padded to a power of two, at least 16.
        chunk_tiles: the largest number of tiles between two checks of the remaining stick; these tiles are
            software-pipelined.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
        max_registers: limit of registers for a thread, None for the compiler's choice. Fewer registers let more
            programs share a multiprocessor.
        copy_engine: whether tiles are loaded by the copy engine (TMA), if the GPU has one.
    """

    block_queries: int
    block_keys: int
    block_head_dim: int
    chunk_tiles: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    copy_engine: bool = True


def training_block_keys(*, head_dim: int, element_bytes: int, shared_memory_bytes: int) -> int:
    """Returns the number of keys of a tile in both passes: the backward pass reads sticks that are stored by tile."""
    padded = padded_to_tile(head_dim)
    if element_bytes == 4:
        return 16 if padded > 128 else 32
    return 64 if padded <= 64 or (padded == 128 and shared_memory_bytes >= ROOMY_SHARED_MEMORY_BYTES) else 32


@functools.lru_cache(maxsize=1024)
def forward_parameters(
    *, head_dim: int, queries: int, element_bytes: int, training_block_keys: int | None = None
) -> LaunchParameters:
    """Returns the forward kernel's parameters for head_dim up to 256. With gradients, pass `training_block_keys`."""
    padded = padded_to_tile(head_dim)
    if element_bytes == 4:
        return LaunchParameters(
            block_queries=min(64, padded_to_tile(queries)),
            block_keys=training_block_keys or 32,
            block_head_dim=padded,
            chunk_tiles=4,
            num_warps=4,
            num_stages=1 if padded > 64 else 2,
        )
    wide = padded == 128 and training_block_keys == 64 and queries > 64
    return LaunchParameters(
        block_queries=min(128 if wide else 64, padded_to_tile(queries)),
        block_keys=training_block_keys or (64 if padded <= 64 else 32),
        block_head_dim=padded,
        chunk_tiles=64,
        num_warps=8 if wide else 4,
        num_stages=3 if padded <= 128 else 2,
        max_registers=None if wide or padded > 128 else 96 if padded <= 32 else 144 if padded == 64 else 168,
        # small tiles take less time than the barriers around the copies
        copy_engine=padded > 32,
    )


def backward_parameters(
    *, head_dim: int, queries: int, element_bytes: int, shared_memory_bytes: int
) -> LaunchParameters:
    """Returns the backward kernel's parameters for head_dim up to 256 and a program's limit of shared memory."""
    padded = padded_to_tile(head_dim)
    block_keys = training_block_keys(
        head_dim=head_dim, element_bytes=element_bytes, shared_memory_bytes=shared_memory_bytes
    )
    if element_bytes == 4:
        return LaunchParameters(
            block_queries=min(32, padded_to_tile(queries)),
            block_keys=block_keys,
            block_head_dim=padded,
            chunk_tiles=1,
            num_warps=4,
            num_stages=1,
        )
    roomy = shared_memory_bytes >= ROOMY_SHARED_MEMORY_BYTES
    tall = padded == 128 and queries > 64 and roomy
    return LaunchParameters(
        block_queries=min(128 if tall else 64, padded_to_tile(queries)),
        block_keys=block_keys,
        block_head_dim=padded,
        chunk_tiles=1,
        num_warps=8 if tall or (padded > 128 and queries > 32) else 4,
        num_stages=1 if padded > 128 or (padded == 128 and not tall) else 3 if roomy else 2,
        max_registers=168 if padded <= 32 else None,
    )


def backward_programs_together(*, num_warps: int, cache_bytes: int) -> int:
    """Returns how many programs are enough to fill the GPU in the backward pass, given the size of its L2 cache.

    `heads_at_once` adds heads until there are so many programs. With more heads at once, the gradients of keys and
    values no longer fit in the L2 cache of an H100, and programs wait for them (benchmarks/results/attention_h100.md).
    A program of eight warps has a multiprocessor to itself; two programs of four warps share one.
    """
    return PROGRAMS_TOGETHER if cache_bytes >= ROOMY_CACHE_BYTES else 2 * PROGRAMS_TOGETHER // num_warps


def heads_at_once(
    *, heads: int, bytes_a_head: int, blocks: int, cache_bytes: int, programs: int = PROGRAMS_TOGETHER
) -> int:
    """Returns how many heads run at once: about as many as fit in the L2 cache, and enough to fill the GPU.

    At 64K tokens, 16 heads do not fit in the L2 cache of an H200. With all of them at once the backward pass takes 191
    ms at head_dim 64 and 255 ms at 128; with as many as fit, 100 and 184 ms (benchmarks/results/kernel_tuning_h200.md).
    If heads run in several rounds, they are spread evenly over the rounds, since a last round of a few heads would
    leave the GPU half empty.

    Args:
        heads: heads of the call, times the batch size.
        bytes_a_head: bytes that one head's keys, values and gradients take in the cache.
        blocks: number of programs of a head.
        cache_bytes: size of the L2 cache, 0 if there is none.
        programs: number of programs that fill the GPU.
    """
    fitting = max(1, cache_bytes // (2 * max(bytes_a_head, 1)), -(-programs // max(blocks, 1)))
    rounds = max(1, round(heads / fitting))
    return max(1, -(-heads // rounds))


def padded_to_tile(size: int) -> int:
    """Returns the size padded to a power of two, at least 16, as tensor cores need it."""
    return max(16, 1 << (size - 1).bit_length())
