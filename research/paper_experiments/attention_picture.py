"""The attention weights of a small model on one sequence, and their picture.

    python -m research.paper_experiments.attention_picture build/mqrar/stickbreaking_16.npz attention.png

Shape suffixes: H query heads, G key/value heads, L tokens, D head dimension.
"""

import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sbeval.attention.impl.reference import log_weights
from sbeval.models.attention import SoftmaxMixer, StickBreakingMixer

PIXELS_A_WEIGHT = 5
GAP_PIXELS = 12
GREY = 208


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


def picture(weights: NDArray[Any]) -> NDArray[np.uint8]:
    """Draws weights [layers, H, L, L] as grey squares, dark where much is given; layers side by side, heads below.

    Returns:
        [height, width] grey values.
    """
    layers, heads, length, _ = weights.shape
    side = length * PIXELS_A_WEIGHT
    image = np.full((heads * (side + GAP_PIXELS) - GAP_PIXELS, layers * (side + GAP_PIXELS) - GAP_PIXELS), GREY)
    for layer in range(layers):
        for head in range(heads):
            shades = np.round(255 * (1 - weights[layer, head].astype(np.float32))).clip(0, 255)
            top, left = head * (side + GAP_PIXELS), layer * (side + GAP_PIXELS)
            image[top : top + side, left : left + side] = shades.repeat(PIXELS_A_WEIGHT, 0).repeat(PIXELS_A_WEIGHT, 1)
    return image.astype(np.uint8)


def write_png(image: NDArray[np.uint8], file: Path) -> None:
    """Writes grey values [height, width] as a PNG."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def main(arguments: Sequence[str]) -> None:
    """Draws a file of weights."""
    source, target = arguments
    write_png(picture(np.load(source)["weights"]), Path(target))


if __name__ == "__main__":
    main(sys.argv[1:])
