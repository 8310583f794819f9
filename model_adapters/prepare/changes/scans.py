"""Runs Mamba-2's scan over a long text in segments, one after another, to limit its memory.

Without the package `mamba_ssm`, transformers computes all chunks of a Mamba-2 layer at once, with about a thousand
values for each token and head. The scan takes initial states, so it can be called for `SEGMENT_TOKENS` tokens at once:
each call starts from the final states of the call before.

Shape suffixes: B batch, L positions, H heads, P head_dim, G groups, N state size.
"""

import functools
import importlib.util
import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.replacing import Forward, give_back_forwards, with_name
from sbeval.scoring.body import same_but_for_rounding

SEGMENT_TOKENS = 4096
_SCAN = "mamba2_chunk_scan"


class SegmentedScan:
    """Replaces `mamba2_chunk_scan` of a model's file by a loop that calls it for consecutive segments of the text."""

    def __init__(self, original: Forward, segment_tokens: int) -> None:
        self._original, self.segment_tokens = original, segment_tokens

    def __call__(
        self,
        hidden_BLHP: Tensor,
        dt_BLH: Tensor,
        A: Tensor,
        B_BLGN: Tensor,
        C_BLGN: Tensor,
        chunk_size: int,
        *,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        **others: Any,
    ) -> Any:
        """Returns the output [B, L, H, P] and, if `return_final_states`, the states [B, H, P, N] after position L."""
        step = max(1, self.segment_tokens // chunk_size) * chunk_size  # a multiple of the scan's own chunk size
        states, outputs = initial_states, []
        for start in range(0, hidden_BLHP.shape[1], step):
            hidden, dt, B, C = (x[:, start : start + step] for x in (hidden_BLHP, dt_BLH, B_BLGN, C_BLGN))
            options = {"initial_states": states, "return_final_states": True, **others}
            output, states = self._original(hidden, dt, A, B, C, chunk_size=chunk_size, **options)
            outputs.append(output)
        whole = torch.cat(outputs, dim=1)
        return (whole, states) if return_final_states else whole


def scan_in_segments(model: nn.Module) -> list[nn.Module]:
    """Makes Mamba-2 layers scan in segments if their scan accepts initial states, and returns the changed layers."""
    changed: list[nn.Module] = []
    if importlib.util.find_spec("mamba_ssm") is not None:  # transformers uses its kernels, which need little memory
        return changed
    for module in model.modules():
        if "forward" in vars(module) or hasattr(module, "_hf_hook"):
            continue
        if (forward := _scanning(type(module).forward)) is not None:
            module.forward = types.MethodType(forward, module)
            changed.append(module)
    return changed


@functools.cache
def _scanning(forward: Forward) -> Forward | None:
    def stand_in(original: Forward) -> SegmentedScan | None:
        return SegmentedScan(original, SEGMENT_TOKENS) if _continues(original) else None

    # transformers wraps some forwards for accelerate's hooks; the wrapped forward is the one that calls the scan
    return with_name(inspect.unwrap(forward), _SCAN, stand_in)


@torch.no_grad()
def _continues(original: Forward) -> bool:
    """Whether scanning a sample in segments gives the same result as scanning it at once."""
    generator = torch.Generator().manual_seed(0)
    hidden_BLHP, dt_BLH, B_BLGN, C_BLGN = (
        torch.randn(shape, generator=generator) for shape in ((1, 11, 4, 3), (1, 11, 4), (1, 11, 2, 5), (1, 11, 2, 5))
    )
    inputs = hidden_BLHP, dt_BLH, -torch.arange(1.0, 5.0), B_BLGN, C_BLGN
    options: dict[str, Any] = {"chunk_size": 2, "D": torch.ones(4), "dt_softplus": True, "return_final_states": True}
    try:
        expected, in_pieces = original(*inputs, **options), SegmentedScan(original, 4)(*inputs, **options)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return all(same_but_for_rounding(*both) for both in zip(in_pieces, expected, strict=True))


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return functools.partial(give_back_forwards, changed) if (changed := scan_in_segments(model)) else None


# the trial cannot judge this change, since a short text is a single segment: `_continues` compares the scans instead
CHANGE = Change(name="scans in segments", apply=_apply)
