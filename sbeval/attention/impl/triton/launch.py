"""Launch parameters as a plain function of the problem, so that they can be read, tested and tuned without a GPU."""

import dataclasses
import functools

LOG2_E = 1.4426950408889634

# what an H100 or H200 lets a program use; the A100 has less, and consumer GPUs less than half
ROOMY_SHARED_MEMORY_BYTES = 227 * 1024

# some rounds of programs over all multiprocessors: fewer would leave them idle when the last long rows end
PROGRAMS_TOGETHER = 2048

# an H200's second-level cache; an H100 has 50 MiB, and slower memory behind it
ROOMY_CACHE_BYTES = 60 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchParameters:
    """What a kernel is compiled with.

    Attributes:
        block_head_dim: head_dim padded to a power of two, at least 16.
        chunk_tiles: most tiles between two looks at the remaining stick, the stretch that is software-pipelined.
        max_registers: most registers a thread may use, None for as many as the compiler likes; fewer let more programs
            share a multiprocessor.
        copy_engine: whether the copy engine brings tiles, where there is one.
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
    """Keys of a tile in both passes where gradients are wanted: the backward pass starts from sticks kept by tile."""
    padded = padded_to_tile(head_dim)
    if element_bytes == 4:
        return 16 if padded > 128 else 32
    return 64 if padded <= 64 or (padded == 128 and shared_memory_bytes >= ROOMY_SHARED_MEMORY_BYTES) else 32


@functools.lru_cache(maxsize=1024)
def forward_parameters(
    *, head_dim: int, queries: int, element_bytes: int, training_block_keys: int | None = None
) -> LaunchParameters:
    """Parameters of the forward kernel for a head_dim up to 256; `training_block_keys` where gradients are wanted."""
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
        # where a tile takes little time the barriers around the engine's copies cost more than addresses do
        copy_engine=padded > 32,
    )


def backward_parameters(
    *, head_dim: int, queries: int, element_bytes: int, shared_memory_bytes: int
) -> LaunchParameters:
    """Parameters of the backward kernel for a head_dim up to 256, where a program may use so much shared memory."""
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
    """How many programs of the backward pass work on the same heads, at least, where the cache has so many bytes.

    With more heads at once an H100 waits for the gradients of keys and values, which leave its cache
    (benchmarks/results/attention_h100.md). A program of eight warps has a multiprocessor to itself; of four warps two
    share one.
    """
    return PROGRAMS_TOGETHER if cache_bytes >= ROOMY_CACHE_BYTES else 2 * PROGRAMS_TOGETHER // num_warps


def heads_at_once(
    *, heads: int, bytes_a_head: int, blocks: int, cache_bytes: int, programs: int = PROGRAMS_TOGETHER
) -> int:
    """How many heads programs work on together: about as many as the cache holds, enough to keep the machine filled.

    All rounds have about as many heads: a few left for a last round would leave the machine half empty. `blocks` are
    the programs of a head, `programs` are enough to fill the machine; `cache_bytes` is 0 where there is no second-level
    cache.
    """
    fitting = max(1, cache_bytes // (2 * max(bytes_a_head, 1)), -(-programs // max(blocks, 1)))
    rounds = max(1, round(heads / fitting))
    return max(1, -(-heads // rounds))


def padded_to_tile(size: int) -> int:
    """Returns the size padded to a power of two, at least 16, as the factors of a product on the tensor cores are."""
    return max(16, 1 << (size - 1).bit_length())
