"""A long window of the paper's 6.5-billion mixture of experts: tokens a second and memory, random weights in bf16.

    PYTHONPATH=benchmarks python benchmarks/architectures/experts.py
        [--preset moe-6.5b] [--length 65536] [--windows 3] [--layers 40]

A window is scored as perplexity tasks score it: one pass, every target, without [length, vocabulary] logits. Random
weights leave logits around zero, where sticks break within some hundred tokens and attention stops there; for the row
`whole` queries and keys are constants of which no stick breaks, so that every key is visited. A random router spreads
tokens about evenly over experts.
"""

import argparse
import statistics
import time

import torch
from measuring import machine

from sbeval.models import SbevalForCausalLM, preset
from sbeval.scoring.scorer import TokenScorer

STICK_LOGIT = -9.0


def random_model(name: str, layers: int | None, device: str) -> SbevalForCausalLM:
    """Returns a preset with this number of layers and random bf16 weights, created on the device."""
    torch.manual_seed(0)
    config = preset(name, **({} if layers is None else {"num_hidden_layers": layers}))
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = SbevalForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    model.apply(model._init_weights)
    return model.eval()


def keep_sticks_whole(model: SbevalForCausalLM) -> None:
    """Makes every logit about `STICK_LOGIT`: queries and keys become constants of opposite sign."""
    assert model.config.head_dim is not None
    size = (-STICK_LOGIT / model.config.head_dim**0.5) ** 0.5
    for layer in model.model.layers:
        for projection, value in ((layer.self_attn.q_proj, -size), (layer.self_attn.k_proj, size)):
            projection.register_forward_hook(lambda module, args, output, value=value: output * 0.0 + value)


def seconds_of(call: object, device: str) -> float:
    """Returns the time of a call, until the device has finished."""
    start = time.perf_counter()
    call()  # type: ignore[operator]
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="moe-6.5b")
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(arguments.preset, arguments.layers, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{machine()}\n\n{arguments.preset}, {parameters / 1e9:.2f} billion parameters, bf16, random weights\n")
    print("| sticks | window, tokens | tokens a second | weights, GiB | at most held, GiB |")
    print("|---|---|---|---|---|")
    length = arguments.length
    ids = torch.randint(0, model.config.vocab_size, (1, length + 1), device=device)
    rows, positions = torch.zeros(length, dtype=torch.int64), torch.arange(length)
    weights_gib = sum(one.numel() * one.element_size() for one in model.parameters()) / 2**30
    for sticks in ("breaking", "whole"):
        if sticks == "whole":
            keep_sticks_whole(model)
        scorer = TokenScorer(model)

        def window(scorer: TokenScorer = scorer) -> None:
            scorer.score(ids[:, :-1], rows, positions, ids[0, 1:])

        window()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = statistics.median(seconds_of(window, device) for _ in range(arguments.windows))
        held = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else ""
        print(f"| {sticks} | {length} | {length / taken:.0f} | {weights_gib:.1f} | {held} |", flush=True)


if __name__ == "__main__":
    main()
