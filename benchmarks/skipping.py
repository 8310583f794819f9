"""The speed-up of skipping, and its changes of outputs, on real activations of a trained checkpoint.

    python benchmarks/skipping.py [--checkpoint FOLDER] [--length 65536] [--growth 4096 16384 65536 262144]

Queries, keys and values of every layer are captured while the model reads one window of the standard library. On them,
in one run: the time of all layers' attention, dense (no stop at all), with the exact stop (the stick is below fp32's
normal numbers; the default without a threshold), at several thresholds, and of PyTorch's FlashAttention-2; how much the
outputs change; shares of tiles and times by layer and head; how times grow with the length. These are times of kernels,
recorded as CUDA graphs. Then the model scores the window: its NLL and tokens a second at each setting, and once more,
over several windows, in fp32, where rounding does not hide what a threshold changes. The checkpoint is the shipped one
by default; a CPU computes small lengths.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from activations import SHIPPED, LayerInputs, captured, load, set_kernels, text_window
from measuring import graphed, interleaved, machine
from tile_shares import stops, visited
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl.triton import function
from sbeval.models.attention import StickBreakingKernels
from sbeval.scoring.scorer import TokenScorer

SETTINGS: dict[str, float | None] = {
    "dense": None, "exact stop": None,
    "1e-6": 1e-6, "1e-5": 1e-5, "1e-4": 1e-4, "1e-3": 1e-3, "3e-3": 3e-3, "5e-3": 5e-3, "7e-3": 7e-3,
}  # fmt: skip
CHOSEN = "1e-5"
FLASH = "flash (SDPA)"
TILE_ROWS, TILE_KEYS = 64, 64


@contextmanager
def stopping(setting: str) -> Iterator[None]:
    """Within it the kernels have no exact stop where the setting is "dense"."""
    before = function.LOG2_NOTHING_LEFT
    function.LOG2_NOTHING_LEFT = -math.inf if setting == "dense" else before
    try:
        yield
    finally:
        function.LOG2_NOTHING_LEFT = before


def attend(layer: LayerInputs, setting: str) -> Tensor:
    """Output of one layer's attention."""
    with stopping(setting):
        return stickbreaking_attention(
            layer.q, layer.k, layer.v, scale=layer.scale, attend_current=layer.attend_current,
            skip_threshold=SETTINGS[setting],
        ).output  # fmt: skip


def softmax(layer: LayerInputs) -> Tensor:
    """FlashAttention-2 on the same tensors."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if layer.q.is_cuda else nullcontext():
        return torch.nn.functional.scaled_dot_product_attention(layer.q, layer.k, layer.v, is_causal=True)


def one_head(layer: LayerInputs, head: int) -> LayerInputs:
    """One query head with its key head."""
    group = head // (layer.q.shape[1] // layer.k.shape[1])
    q, k, v = (
        tensor[:, at : at + 1].contiguous() for tensor, at in ((layer.q, head), (layer.k, group), (layer.v, group))
    )
    return LayerInputs(q=q, k=k, v=v, scale=layer.scale, attend_current=layer.attend_current)


def all_layers(run: Callable[[LayerInputs], Tensor], layers: list[LayerInputs]) -> None:
    """Every layer, one after the other."""
    for layer in layers:
        run(layer)


def calls(layers: list[LayerInputs], settings: list[str]) -> dict[str, Callable[[], Any]]:
    """Returns the kernels to time, by name, without the time of their launches from Python."""
    runs = {name: functools.partial(attend, setting=name) for name in settings} | {FLASH: softmax}
    found = {name: functools.partial(all_layers, run, layers) for name, run in runs.items()}
    return {name: graphed(call) for name, call in found.items()} if layers[0].q.is_cuda else dict(found)


def whole(layers: list[LayerInputs], milliseconds: float) -> None:
    """Times all layers, and measures how skipping changes their outputs."""
    times = interleaved(calls(layers, list(SETTINGS)), milliseconds=milliseconds)
    plain = [attend(layer, "dense") for layer in layers]
    print("\nAll layers' attention. A change is that of the output against dense; its bound is threshold x max |v|.\n")
    print(
        "The last column: rows (a query of a head) whose output changes by more, in norm, than bf16's rounding, 2^-9.\n"
    )
    print("| setting | ms p20/p50/p80 | x dense | x flash | largest change | of its bound | relative change | rows |")
    print("|---" * 8 + "|")
    for name, (low, median, high) in times.items():
        row = f"| {name} | {low:.2f}/{median:.2f}/{high:.2f} | {times['dense'][1] / median:.2f} | "
        row += f"{times[FLASH][1] / median:.2f} | "
        if name in SETTINGS:
            found = [attend(layer, name) for layer in layers]
            changes = [(a.float() - b.float()).abs().max().item() for a, b in zip(found, plain, strict=True)]
            norms = [
                ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, plain, strict=True)
            ]
            threshold = SETTINGS[name]
            bounds = [(threshold or math.inf) * layer.v.abs().max().item() for layer in layers]
            share = max(change / bound for change, bound in zip(changes, bounds, strict=True))
            rows = torch.stack([changed_rows(a.float(), b.float()) for a, b in zip(found, plain, strict=True)]).mean()
            row += f"{max(changes):.1e} | {share:.2f} | {max(norms):.1e} | {100 * rows:.3f} % |"
        else:
            row += "| | | |"
        print(row, flush=True)


def changed_rows(found: Tensor, plain: Tensor) -> Tensor:
    """Share of the rows that differ by more than bf16's rounding of a number."""
    return ((found - plain).norm(dim=-1) > 2.0**-9 * plain.norm(dim=-1)).float().mean()


def by_head(layers: list[LayerInputs], milliseconds: float) -> None:
    """Measures the visited tiles and the time of every single head."""
    print("\nBy layer and head, each timed alone. Tiles are counted from the logits: the percentage of the causal ones")
    print(f"({TILE_ROWS} x {TILE_KEYS}) visited at the exact stop and at {CHOSEN}.\n")
    times_of = f"dense ms | exact ms | {CHOSEN} ms | flash ms | x dense | x flash"
    print(f"| layer | head | tiles, exact | tiles, {CHOSEN} | {times_of} |")
    print("|---" * 10 + "|")
    threshold = SETTINGS[CHOSEN]
    assert threshold is not None
    for number, layer in enumerate(layers):
        for head in range(layer.q.shape[1]):
            alone = one_head(layer, head)
            seen, causal = visited(stops(alone, 0, [0.0, threshold]), TILE_ROWS, TILE_KEYS, layer.attend_current)
            shares = (100 * seen.sum(-1) / causal.sum()).tolist()
            times = interleaved(calls([alone], ["dense", "exact stop", CHOSEN]), milliseconds=milliseconds)
            dense, exact, chosen, flash = (times[name][1] for name in ("dense", "exact stop", CHOSEN, FLASH))
            row = (
                f"| {number} | {head} | {shares[0]:.1f} | {shares[1]:.1f} | {dense:.3f} | {exact:.3f} | {chosen:.3f} | "
            )
            print(f"{row}{flash:.3f} | {dense / chosen:.2f} | {flash / chosen:.2f} |", flush=True)


def growth(model: Any, tokenizer: Any, lengths: list[int], milliseconds: float) -> None:
    """Times of all layers at several lengths."""
    names = ["dense", "exact stop", CHOSEN]
    print("\nAll layers' attention in ms as the window grows.\n")
    print("| tokens | " + " | ".join([*names, FLASH]) + " | x dense | x flash |")
    print("|---" * (len(names) + 4) + "|")
    for length in lengths:
        layers = captured(model, text_window(tokenizer, length))
        times = interleaved(calls(layers, names), milliseconds=milliseconds)
        medians = [times[name][1] for name in (*names, FLASH)]
        ratios = [times["dense"][1] / times[CHOSEN][1], times[FLASH][1] / times[CHOSEN][1]]
        print(f"| {length} | " + " | ".join(f"{ms:.2f}" for ms in (*medians, *ratios)) + " |", flush=True)


def by_window(model: Any, tokenizer: Any, length: int, windows: int, milliseconds: float) -> None:
    """Times all layers on several windows of the text, since skipping depends on the text."""
    names = [name for name in SETTINGS if name != "dense"]
    print("\nAll layers' attention, other windows of the text: time of dense over each setting's, and over it that of")
    print(f"{FLASH}; percentages of the causal tiles ({TILE_ROWS} x {TILE_KEYS}) visited.\n")
    print("| window | dense ms | " + " | ".join(names) + f" | {FLASH} at {CHOSEN} | tiles, exact | tiles, {CHOSEN} |")
    print("|---" * (len(names) + 5) + "|")
    for number in range(windows):
        layers = captured(model, text_window(tokenizer, length, number=number))
        times = interleaved(calls(layers, ["dense", *names]), milliseconds=milliseconds)
        ratios = [times["dense"][1] / times[name][1] for name in names] + [times[FLASH][1] / times[CHOSEN][1]]
        row = f"| {number} | {times['dense'][1]:.2f} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{row} | " + " | ".join(f"{share:.1f}" for share in _shares(layers)) + " |", flush=True)


def _shares(layers: list[LayerInputs]) -> list[float]:
    """Percentages of all causal tiles that the exact stop and the chosen threshold visit."""
    seen_by_head, causal_tiles = [], 0
    for layer in layers:
        for head in range(layer.q.shape[1]):
            seen, causal = visited(
                stops(layer, head, [0.0, SETTINGS[CHOSEN] or 0.0]), TILE_ROWS, TILE_KEYS, layer.attend_current
            )
            seen_by_head.append(seen.sum(-1))
            causal_tiles += int(causal.sum())
    return [100.0 * float(share) / causal_tiles for share in torch.stack(seen_by_head).sum(0)]


def scoring(model: Any, tokens: Tensor, milliseconds: float) -> None:
    """NLL of the window and tokens a second, end to end."""
    scorer = TokenScorer(model)
    targets = tokens[0, 1:]
    rows, positions = torch.zeros_like(targets), torch.arange(len(targets))

    def score(setting: str) -> Tensor:
        set_kernels(model, StickBreakingKernels(skip_threshold=SETTINGS[setting]))
        with stopping(setting):
            return scorer.score(tokens.to(model.device), rows, positions, targets).logprobs.double()

    print("\nThe model scores the window; NLL in nats a token, changes against dense.\n")
    print("| setting | NLL | change | mean size of a token's change | tokens/s | x dense |")
    print("|---|---|---|---|---|---|")
    times = interleaved({name: functools.partial(score, name) for name in SETTINGS}, milliseconds=milliseconds)
    plain = score("dense")
    for name in SETTINGS:
        found = score(name)
        change = (plain - found).mean().item()
        row = f"| {name} | {-found.mean().item():.6f} | {change:+.1e} | {(found - plain).abs().mean().item():.1e} | "
        speed = tokens.shape[1] / times[name][1] * 1e3
        print(f"{row}{speed:,.0f} | {times['dense'][1] / times[name][1]:.2f} |", flush=True)


def changes_of_nll(checkpoint: Path, tokenizer: Any, device: str, length: int, windows: int) -> None:
    """Measures how each threshold changes the NLL of several windows, in fp32 and in bf16."""
    numbers = range(windows)
    print(
        f"\nThe NLL of {windows} windows of {length} tokens, nats a token: its change against dense, mean over windows"
    )
    print("with its standard error, and the largest of one window.\n")
    print("| setting | dtype | NLL | mean change | standard error | largest of a window |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = load(checkpoint, device=device, dtype=dtype)
        scorer = TokenScorer(model)
        found: dict[str, Tensor] = {}
        for name in SETTINGS:
            set_kernels(model, StickBreakingKernels(skip_threshold=SETTINGS[name]))
            means = []
            for number in numbers:
                tokens = text_window(tokenizer, length, number=number)
                targets = tokens[0, 1:]
                rows, positions = torch.zeros_like(targets), torch.arange(len(targets))
                with stopping(name):
                    scored = scorer.score(tokens.to(device), rows, positions, targets)
                means.append(-scored.logprobs.double().mean())
            found[name] = torch.stack(means)
            change = found[name] - found["dense"]
            error = change.std() / windows**0.5
            row = f"| {name} | {str(dtype).removeprefix('torch.')} | {found[name].mean():.6f} | {change.mean():+.1e} | "
            print(f"{row}{error:.1e} | {change.abs().max():.1e} |", flush=True)


@torch.no_grad()
def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED)
    parser.add_argument("--length", type=int, help="65536 on a GPU, 1024 on a CPU")
    parser.add_argument("--growth", type=int, nargs="*", help="4096 16384 65536 262144 on a GPU, 256 1024 on a CPU")
    parser.add_argument("--windows", type=int, default=4, help="windows that are timed and whose NLL is compared")
    parser.add_argument("--milliseconds", type=float, default=200.0, help="how long each setting is timed")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    length = arguments.length or (65536 if device == "cuda" else 1024)
    lengths = arguments.growth
    if lengths is None:
        lengths = [4096, 16384, 65536, 262144] if device == "cuda" else [256, 1024]
    model, tokenizer = load(arguments.checkpoint, device=device, dtype=dtype)
    set_kernels(model, StickBreakingKernels())
    tokens = text_window(tokenizer, length)
    layers = captured(model, tokens)
    shape = "x".join(map(str, layers[0].q.shape))
    print(f"{machine()}\n\n{arguments.checkpoint.name}, {len(layers)} layers, queries {shape}, {dtype}")
    whole(layers, arguments.milliseconds)
    by_window(model, tokenizer, length, arguments.windows, arguments.milliseconds)
    scoring(model, tokens, arguments.milliseconds)
    changes_of_nll(arguments.checkpoint, tokenizer, device, length, arguments.windows)
    set_kernels(model, StickBreakingKernels())
    growth(model, tokenizer, lengths, arguments.milliseconds)
    by_head(layers, arguments.milliseconds / 8)


if __name__ == "__main__":
    main()
