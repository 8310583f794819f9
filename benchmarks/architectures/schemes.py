"""What attention schemes cost: windows of 16K and 64K tokens and decode steps, beside softmax and stick-breaking.

    PYTHONPATH=benchmarks python benchmarks/architectures/schemes.py

Models of the paper's 350M size (bf16, random weights) that differ in attention alone. A window is one forward pass
without the head, in turns with RoPE. Memory is the peak above the weights. A decode step adds one token to a text of as
many tokens: with a cache that grows, as transformers has it, and, where a scheme allows it, in a slot of fixed size as
a CUDA graph. A scheme whose attention of 2,048 tokens differs from fp64 by two percent gets no times.
`kernel` is the name in the run's record. ALiBi's heads are computed apart from it: in compiled FlexAttention for
softmax, in PyTorch for entmax. adasplash tunes its kernels for each length, which `ADASPLASH_TEST_FAST_AUTOTUNE=1`
shortens. Without a GPU all is small, and says only that it runs.
"""

import argparse
import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import interleaved, machine, relative_error, shown
from torch import Tensor

from sbeval.model_adapters.generate.slots.graph_capture import GraphCapture
from sbeval.model_adapters.generate.slots.stepper import Stepper
from sbeval.model_adapters.record import kernels_in_use
from sbeval.models import SbevalForCausalLM, preset
from sbeval.models.attention import SoftmaxMixer
from sbeval.models.biases import AlibiBias
from sbeval.models.entmax.definition import reference_attention

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SCHEMES: dict[str, dict[str, str]] = {
    "softmax, RoPE": {"attention": "rope"},
    "stick-breaking": {"attention": "stickbreaking"},
    "FoX": {"attention": "forgetting"},
    "SSMax, RoPE": {"attention": "rope", "attention_weights": "ssmax"},
    "entmax-1.5, RoPE": {"attention": "rope", "attention_weights": "entmax15"},
    "ASEntmax, RoPE": {"attention": "rope", "attention_weights": "asentmax"},
    "ALiBi": {"attention": "alibi"},
    "NAPE": {"attention": "nape"},
    "ASEntmax, NAPE": {"attention": "nape", "attention_weights": "asentmax"},
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CHECKED_TOKENS = 2048 if GPU else 64
LARGEST_ERROR = 0.02
STEPS = 8


def model_of(fields: dict[str, str]) -> Any:
    """Returns a model of one scheme with random weights."""
    torch.manual_seed(0)
    config = preset("350m", **fields, **({} if GPU else SMALL), training_length_tokens=1024)
    with DEVICE:  # random weights of 350M parameters take ten seconds on a CPU
        model = SbevalForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def attention_error(mixer: SoftmaxMixer) -> float:
    """Returns the error of two heads' attention against fp64, for random heads with logits of a spread of 2."""
    q, k, v = (torch.randn(1, 2, CHECKED_TOKENS, mixer.head_dim, device=DEVICE).bfloat16() for _ in range(3))
    q = 2 * q
    slopes = None
    whole = mixer.bias
    if isinstance(whole, AlibiBias):  # the first head has a slope, the last one may have none
        mixer.bias = AlibiBias(2, [whole.slopes[0], whole.slopes[-1]])
        slopes = torch.tensor(mixer.bias.slopes, dtype=torch.float64, device=DEVICE)
    found = mixer(q, k, v, _places(), None)
    mixer.bias = whole
    double = (x.double() for x in (q, k, v))
    exact = reference_attention(*double, scale=mixer.scale, slope_H=slopes, entmax=mixer.entmax)
    return relative_error(found, exact)


def _places() -> Any:
    from sbeval.models.positions import Positions

    return Positions(torch.arange(CHECKED_TOKENS, device=DEVICE)[None], None, None)


def window(model: Any, ids_1L: Tensor) -> None:
    """Runs one window without the head."""
    model.model(input_ids=ids_1L, use_cache=False)


def peak_bytes(call: Callable[[], Any]) -> float:
    """Returns the peak memory of a call above what is allocated before it; NaN on a CPU."""
    if not GPU:
        return float("nan")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return float(torch.cuda.max_memory_allocated() - before)


def growing_step(model: Any, ids_1L: Tensor) -> Callable[[], None]:
    """Returns a call of some steps with a cache that grows; the cache is cut back after each."""
    cache = model(input_ids=ids_1L, use_cache=True, logits_to_keep=1).past_key_values
    newest = ids_1L[:, -1:]

    def steps() -> None:
        for _ in range(STEPS):
            model(input_ids=newest, past_key_values=cache, use_cache=True)
        cache.crop(-STEPS)

    return steps


def step_in_a_slot(model: Any, ids_1L: Tensor) -> Callable[[], None] | None:
    """Returns a call of some steps in a slot, captured as a CUDA graph; None for schemes that slots do not support."""
    length = ids_1L.shape[1]
    stepper = Stepper(model, slots=1, room_tokens=length + 2, most_new_tokens=1 << 16)
    try:
        stepper.capture(GraphCapture(DEVICE))
        stepper.start([0], [ids_1L[0].cpu().numpy().astype(np.int64)], [1 << 15])
        stepper.try_step()
    except ValueError:
        return None
    position = stepper.cache.position_B.clone()

    def steps() -> None:
        for _ in range(STEPS):
            stepper.cache.position_B.copy_(position)  # every step writes the same place of the slot
            stepper.run(1)

    return steps


@torch.no_grad()
def measure(lengths: list[int], names: list[str], milliseconds: float) -> None:
    """Prints one table."""
    columns = ("scheme", "kernel", "error", "tokens", "window, ms p20/p50/p80", "of RoPE", "memory, GiB", "step, ms")
    print(f"| {' | '.join(columns)} | in a slot, ms |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    models = {name: model_of(SCHEMES[name]) for name in names}
    errors = {}
    for name, model in models.items():
        mixer = model.model.layers[0].self_attn.mixer
        if isinstance(mixer, SoftmaxMixer) and (mixer.entmax or SCHEMES[name]["attention"] in ("rope", "nape")):
            errors[name] = attention_error(mixer)
    base = next(iter(SCHEMES))
    for length in lengths:
        ids = torch.randint(1000, (1, length), device=DEVICE)
        for name, model in models.items():
            kernel = kernels_in_use(model, "auto", DEVICE)
            error = f"{errors[name]:.1e}" if name in errors else ""
            if errors.get(name, 0.0) > LARGEST_ERROR:
                print(f"| {name} | {kernel} | {error} | {length:,} | wrong | | | | |", flush=True)
                continue
            turns = [base, name] if base in names else [name]
            windows = {each: functools.partial(window, models[each], ids) for each in turns}
            times = interleaved(windows, milliseconds=milliseconds)
            share = f"{times[name][1] / times[base][1]:.2f}x" if base in times else ""
            memory = peak_bytes(windows[name]) / 2**30
            step = interleaved({name: growing_step(model, ids)}, milliseconds=milliseconds / 2)[name][1] / STEPS
            slot_call = step_in_a_slot(model, ids)
            slot = ""
            if slot_call is not None:
                slot = f"{interleaved({name: slot_call}, milliseconds=milliseconds / 2)[name][1] / STEPS:.3f}"
            cells = (name, kernel, error, f"{length:,}", shown(times[name], 1), share, f"{memory:.2f}")
            print(f"| {' | '.join(cells)} | {step:.2f} | {slot} |", flush=True)


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536] if GPU else [64, 128])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--milliseconds", type=float, default=1500.0 if GPU else 20.0, help="how long each is timed")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    print(f"{machine()}\n")
    measure(options.lengths, options.schemes, options.milliseconds)


if __name__ == "__main__":
    main()
