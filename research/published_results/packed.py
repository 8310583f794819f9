"""What short context extensions on packed and on joined documents showed, in one process and in several."""

import itertools
import shlex
from pathlib import Path
from typing import Any

from research.published_results.found import Found, table


def packed_section(found: Found) -> list[str]:
    """Returns the section of the page, nothing where none was run."""
    if not found.packed:
        return []
    calls = " or ".join(str(count) for count in sorted({run["calls"] for run in found.packed}))
    worst = max(abs(run["packed_against_alone_bfloat16"][2]) for run in found.packed)
    header = ["checkpoint, documents, machine", "tokens", "of padding", "texts packed", "loss", "tokens/s"]
    header += ["peak memory", "packed minus alone, fp32, bf16"]
    return [
        "## Packed documents in context extension",
        "",
        f"The demo's checkpoints extended for {calls} steps to 4x their length by `sbeval extend`: a test of the "
        "machinery, on the text that models are evaluated on elsewhere, so what came out is evaluated nowhere. With "
        "`separate` documents a step is one packed row (`cu_seqlens`) in which no document sees another; `joined` "
        "documents do. Last column: the extended model's packed loss minus that of each document alone, in fp32 and in "
        f"bf16, where they differ by {worst:.1e} nats at most. Tokens a second are those of one short run each.",
        "",
        *table(header, [_row(run) for run in found.packed]),
        *(line for run in found.sharded for line in _sharded(found, run)),
    ]


def _row(run: dict[str, Any]) -> list[str]:
    return [
        f"{run['name']}, {run['gpu'] or 'CPU'}, addition {run['addition']}",
        f"{run['tokens_of_windows']:,}",
        f"{run['padding_tokens']:,}",
        str(run["texts"] or "-"),
        f"{run['loss_first_nats']:.3f} to {run['loss_last_nats']:.3f}",
        f"{run['tokens_per_second']:,.0f}",
        _mebibytes(run["peak_memory_bytes"]),
        f"{run['packed_against_alone_float32'][2]:+.1e}, {run['packed_against_alone_bfloat16'][2]:+.1e}",
    ]


def _sharded(found: Found, run: dict[str, Any]) -> list[str]:
    """Compares a run with sharded weights, point by point, with the same run in one process of the same addition."""
    (part,) = run["runs"]
    words = shlex.split(part["command"])
    settings = {word: value for word, value in itertools.pairwise(words) if word.startswith("--")}
    batch, micro = int(settings["--batch-tokens"]), int(settings["--micro-batch-tokens"])
    # earlier records do not count processes: --fsdp needs two, and a step has no room for more than this
    processes = part.get("processes") or batch // micro
    name = f"{Path(words[2]).name} {settings.get('--documents', 'separate')}"
    one = next(one for one in found.packed if (one["addition"], one["name"]) == (run["addition"], name))
    alone = {step: loss for step, loss, _ in one["curve"]}
    pairs = [(point["step"], point["loss_nats"], alone[point["step"]]) for point in run["log"]]
    furthest = max(abs(sharded - whole) for _, sharded, whole in pairs)
    ends = ", at ".join(
        f"step {step} {sharded:.4f} against {whole:.4f}" for step, sharded, whole in (pairs[0], pairs[-1])
    )
    command = shlex.join({settings["--data"]: "TEXT", settings["--out"]: "OUT"}.get(word, word) for word in words)
    return [
        f"Several GPUs: `{name}` again with `--fsdp`, which shards weights, gradients and the optimizer, over "
        f"{processes} {part['gpu']}; context {int(settings['--context']):,}, {batch:,} tokens a step. Its losses "
        f"follow those of the one process of addition {run['addition']}: at {ends}, and at the {len(pairs)} points of "
        f"the loss curve no more than {furthest:.1e} nats apart. Peak memory "
        f"{_mebibytes(part['peak_memory_bytes'])} a GPU, in passes of {micro:,} tokens, against "
        f"{_mebibytes(one['peak_memory_bytes'])}.",
        "",
        f"    accelerate launch --num_processes {processes} -m {command}",
        "",
    ]


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f} MiB"
