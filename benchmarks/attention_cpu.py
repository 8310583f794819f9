"""Stick-breaking attention on a CPU (`blockwise`) and PyTorch's softmax attention, on the same tensors.

    OMP_NUM_THREADS=2 python benchmarks/attention_cpu.py --tokens 4096 16384 --heads 2

Both are timed one after the other, again and again, and the ratio is taken within each pair: what else runs on the
machine then slows both alike. Logits lie around -12, so that the stick survives 16,384 keys and nothing is skipped.
A row is printed only if the same call is right against the fp64 definition at 512 tokens.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sbeval.attention import stickbreaking_attention

# at an error above this nothing is timed; fp32 rounding is a few 1e-7
MOST_ERROR = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--skip-threshold", type=float, help="also time with skipping, on logits around -3")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, fp32")
    print("| tokens | logits | stick left (median) | sbeval s | SDPA s | ratio (median) | ratio (20 to 80 %) |")
    print("|---|---|---|---|---|---|---|")
    cases: list[tuple[float, float | None]] = [(-12.0, None)]
    if args.skip_threshold is not None:
        cases.append((-3.0, args.skip_threshold))
    for tokens in args.tokens:
        for logit, threshold in cases:
            check(args.heads, args.head_dim, logit, threshold)
            q, k, v = tensors(args.heads, tokens, args.head_dim, logit, args.backward)
            ours, theirs, remainder = [], [], torch.empty(0)
            for _ in range(args.repeats):
                own, (_, remainder) = timed(lambda: stick(q, k, v, threshold), args.backward, (q, k, v))  # noqa: B023
                other, _ = timed(lambda: (softmax(q, k, v),), args.backward, (q, k, v))  # noqa: B023
                ours.append(own)
                theirs.append(other)
            ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
            low, high = ratios[round(0.2 * (len(ratios) - 1))], ratios[round(0.8 * (len(ratios) - 1))]
            print(
                f"| {tokens} | {logit:g}{'' if threshold is None else f', skipping below {threshold:g}'} "
                f"| {remainder.median():.2g} | {statistics.median(ours):.3f} | {statistics.median(theirs):.3f} "
                f"| {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} |",
                flush=True,
            )


def tensors(
    heads: int, tokens: int, head_dim: int, logit: float, backward: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, head_dim, generator=generator, dtype=dtype) for _ in range(3))
    # one dimension shifts every logit alike
    q[..., 0], k[..., 0] = head_dim**0.5, logit
    return q.requires_grad_(backward), k.requires_grad_(backward), v.requires_grad_(backward)


def stick(q: Tensor, k: Tensor, v: Tensor, threshold: float | None) -> tuple[Tensor, Tensor]:
    return stickbreaking_attention(q, k, v, impl="blockwise", skip_threshold=threshold)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def timed(
    attend: Callable[[], tuple[Tensor, ...]], backward: bool, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[float, tuple[Tensor, ...]]:
    begun = time.perf_counter()
    found = attend()
    if backward:
        torch.autograd.grad(found[0].sum(), inputs)
    return time.perf_counter() - begun, found


def check(heads: int, head_dim: int, logit: float, threshold: float | None) -> None:
    q, k, v = tensors(heads, 512, head_dim, logit, False, torch.float64)
    exact, _ = stickbreaking_attention(q, k, v, impl="reference")
    found, _ = stick(q.float(), k.float(), v.float(), threshold)
    error = float((found.double() - exact).norm() / exact.norm())
    most = MOST_ERROR + (0.0 if threshold is None else threshold * float(v.abs().max() / exact.abs().mean()))
    if not error <= most:
        raise SystemExit(f"Not timed: the result is off by {error:.1e} from fp64, more than {most:.1e}.")


if __name__ == "__main__":
    main()
