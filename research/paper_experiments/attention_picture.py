"""The attention weights of a small model on one sequence, and their picture.

    python -m research.paper_experiments.attention_picture build/mqrar/stickbreaking_16.npz attention.png

Shape suffixes: H query heads, G key/value heads, L tokens, D head dimension.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sbeval.attention.impl.reference import log_weights
from sbeval.models.attention import SoftmaxMixer, StickBreakingMixer

SIDE_PIXELS = 300
LEAST_SHARE = 0.01


@torch.no_grad()
def attention_weights(model: Any, input_ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
    """Returns the tokens [L] and what every query gives to every key, [layers, H, L, L].

    Args:
        model: of this project's family, without a sliding window or a bias.
        input_ids: [1, L].
    """
    layers: list[Tensor] = []

    def look(mixer: nn.Module, args: tuple[Any, ...]) -> None:
        q_HLD, k_GLD = args[0].float(), args[1].float()
        if isinstance(mixer, StickBreakingMixer):
            log_A, _ = log_weights(q_HLD, k_GLD, mixer.scale, mixer.attend_current, None)
            layers.append(log_A[0].exp())
            return
        assert isinstance(mixer, SoftmaxMixer)
        k_HLD = k_GLD.repeat_interleave(q_HLD.shape[1] // k_GLD.shape[1], dim=1)
        logits = mixer.scale * (q_HLD @ k_HLD.mT)
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        layers.append(logits.masked_fill(future, -torch.inf).softmax(-1)[0])

    handles = [
        module.register_forward_pre_hook(look)
        for module in model.modules()
        if isinstance(module, StickBreakingMixer | SoftmaxMixer)
    ]
    try:
        model.eval()(input_ids=input_ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    weights = torch.stack(layers).cpu().numpy().astype(np.float16)
    return input_ids[0].cpu().numpy(), weights


def attention_figure(weights: NDArray[Any], *, title: str) -> dict[str, Any]:
    """Returns the Vega-Lite specification of weights [layers, H, L, L], dark where much is given.

    Layers stand side by side, heads below each other, queries downwards, keys to the right.
    """
    layers, heads, length, _ = weights.shape
    parts = []
    for head in range(heads):
        for layer in range(layers):
            found = weights[layer, head].astype(np.float32)
            given = [
                {"query": query, "key": key, "weight": round(float(found[query, key]), 3)}
                for query, key in np.argwhere(found >= LEAST_SHARE).tolist()
            ]
            words = f"layer {layer + 1}" + (f", head {head + 1}" if heads > 1 else "")
            last = layer == layers - 1 and head == heads - 1
            parts.append(_grid(given, words, length, named=layer == 0, legend=last))
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": f"Weights below {LEAST_SHARE:.0%} are left white."},
        "columns": layers,
        "concat": parts,
        "resolve": {"scale": {"color": "independent"}},
    }


def _grid(given: list[dict[str, Any]], title: str, length: int, *, named: bool, legend: bool) -> dict[str, Any]:
    scale = {"domain": [0, length], "nice": False}
    shade = {
        "field": "weight",
        "type": "quantitative",
        "scale": {"domain": [0, 1], "range": ["#ffffff", "#000000"]},
        "legend": {"title": ["share of the", "query's weight"], "format": ".0%"} if legend else None,
    }
    y_title = "query (position in the sequence)" if named else None
    return {
        "title": {"text": title, "fontSize": 12},
        "width": SIDE_PIXELS,
        "height": SIDE_PIXELS,
        "view": {"stroke": "#888888"},
        "data": {"values": given},
        "transform": [{"calculate": f"datum.{name} + 1", "as": f"{name}_end"} for name in ("key", "query")],
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "key", "type": "quantitative", "scale": scale, "title": "key (position in the sequence)"},
            "x2": {"field": "key_end"},
            "y": {
                "field": "query",
                "type": "quantitative",
                "scale": {**scale, "reverse": True},
                "title": y_title,
                "axis": {"grid": False, "ticks": True},
            },
            "y2": {"field": "query_end"},
            "color": shade,
        },
    }


def write_picture(source: Path, target: Path, *, title: str) -> None:
    """Draws a file of weights as a PNG."""
    from sbeval.reports.figures.images import ImageWriter  # models train on machines that draw nothing

    with ImageWriter(target.parent, ("png",)) as writer:
        writer.publish(attention_figure(np.load(source)["weights"], title=title), target.stem)
        writer.svgs()


def main(arguments: Sequence[str]) -> None:
    """Draws a file of weights."""
    source, target = map(Path, arguments)
    write_picture(source, target, title=f"Attention weights, {source.stem}")


if __name__ == "__main__":
    main(sys.argv[1:])
