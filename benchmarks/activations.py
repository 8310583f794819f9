"""Real queries, keys and values of every stick-breaking layer of a checkpoint, on text of the standard library.

Shape suffixes: B batch, H query heads, G key/value heads, L tokens, D head_dim.
"""

import dataclasses
import importlib.resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.corpora import stdlib_corpus
from sbeval.models.attention import StickBreakingKernels, StickBreakingMixer

SHIPPED = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints" / "stickbreaking"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs of one layer's attention: q [B, H, L, D], k and v [B, G, L, D], the scale of its logits."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    attend_current: bool

    def first(self, length: int) -> "LayerInputs":
        """The first `length` positions."""
        return dataclasses.replace(self, q=self.q[:, :, :length], k=self.k[:, :, :length], v=self.v[:, :, :length])


def load(checkpoint: Path, *, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import sbeval.models  # noqa: F401  registers the family

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


def text_window(tokenizer: Any, length: int, *, number: int = 0) -> Tensor:
    """Window `number` of `length` tokens [1, L] of the standard library's sources, joined by the end-of-text token."""
    ids: list[int] = []
    for document in stdlib_corpus().documents():
        ids += [*tokenizer.encode(document.text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(ids) >= (number + 1) * length:
            return torch.tensor(ids[number * length : (number + 1) * length])[None]
    raise SystemExit(f"the standard library has {len(ids)} tokens, fewer than {(number + 1) * length}")


def mixers(model: nn.Module) -> list[StickBreakingMixer]:
    """The stick-breaking mixers, first layer first."""
    return [module for module in model.modules() if isinstance(module, StickBreakingMixer)]


def set_kernels(model: nn.Module, kernels: StickBreakingKernels) -> None:
    """Chooses how the model's attention is computed."""
    for mixer in mixers(model):
        mixer.kernels = kernels


@torch.no_grad()
def captured(model: Any, tokens: Tensor) -> list[LayerInputs]:
    """Runs the model once and returns the inputs of each layer's attention."""
    layers: list[LayerInputs] = []

    def keep(mixer: StickBreakingMixer, inputs: tuple[Any, ...]) -> None:
        q, k, v = inputs[:3]
        layers.append(LayerInputs(q=q, k=k, v=v, scale=mixer.scale, attend_current=mixer.attend_current))

    hooks = [mixer.register_forward_pre_hook(keep) for mixer in mixers(model)]
    try:
        model.model(input_ids=tokens.to(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return layers
