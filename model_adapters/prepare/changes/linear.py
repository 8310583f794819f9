"""Linear layers, padded with zeros to widths that a GPU's matmul kernels can read at full speed.

The fast kernels need matrices whose rows all start at multiples of 16 bytes. In a Llama-style MLP with 2730 channels in
bf16 the rows do not, and the matmuls fall back to slower kernels. The padding, rows and columns of zeros, changes no
result. It is added once, after loading.
"""

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sbeval.model_adapters.prepare.change import Change, Setting, Undo

ROW_BYTES = 16
_WIDTH_BYTES = 128  # pads to a whole cache line, once a layer needs padding at all


class AlignedLinear(nn.Linear):
    """A linear layer that computes with padded tensors; `weight` and `bias` are views of them with the unpadded shapes.

    Writing into these views changes the layer. If they are replaced (by a merged adapter, another dtype or device, or a
    state dict), the next call of the layer pads the new tensors.
    """

    _padded_weight: Tensor
    _padded_bias: Tensor | None

    def __init__(self, linear_layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear_layer.in_features, linear_layer.out_features
        self.weight = nn.Parameter(linear_layer.weight.detach(), requires_grad=False)
        self.register_parameter("bias", None)
        if linear_layer.bias is not None:
            self.bias = nn.Parameter(linear_layer.bias.detach(), requires_grad=False)
        self._pad()
        self.train(linear_layer.training)

    @property
    def padded_in_features(self) -> int:
        """The width of an input that `forward` need not pad itself: `in_features` values followed by zeros."""
        self._follow_parameters()
        return int(self._padded_weight.shape[1])

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., in_features or padded_in_features] to [..., out_features], a view of the padded output."""
        columns = self.padded_in_features - input.shape[-1]
        output = linear(pad(input, (0, columns)) if columns else input, self._padded_weight, self._padded_bias)
        return output[..., : self.out_features]

    def _follow_parameters(self) -> None:
        if torch.compiler.is_compiling():
            return
        is_current = self.weight.data_ptr() == self._padded_weight.data_ptr()
        if self.bias is None or self._padded_bias is None:
            is_current = is_current and self.bias is self._padded_bias
        else:
            is_current = is_current and self.bias.data_ptr() == self._padded_bias.data_ptr()
        if not is_current:
            self._pad()

    @torch.no_grad()
    def _pad(self) -> None:
        multiple = _WIDTH_BYTES // self.weight.element_size()
        rows, columns = (-(-width // multiple) * multiple for width in self.weight.shape)
        self._padded_weight = self.weight.new_zeros(rows, columns)
        self._padded_weight[: self.out_features, : self.in_features] = self.weight
        self.weight.data = self._padded_weight[: self.out_features, : self.in_features]
        self._padded_bias = None
        if self.bias is not None:
            self._padded_bias = self.bias.new_zeros(rows)
            self._padded_bias[: self.out_features] = self.bias
            self.bias.data = self._padded_bias[: self.out_features]

    def plain(self) -> nn.Linear:
        """Returns an unpadded `nn.Linear` with the same parameters."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        plain.weight, plain.bias = self.weight, self.bias
        return plain.train(self.training)


def align_linears(model: nn.Module) -> int:
    """Pads every linear layer whose widths are not aligned, and returns the number of these layers.

    A layer stays as it is if it shares its weight with another module, if it has hooks or a replaced forward, or if it
    or its weight is an instance of a subclass (adapters, quantised or distributed weights).
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    linears = ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
    unaligned = [name for name, module in linears if owners[id(module.weight)] == 1 and _unaligned(module)]
    for name in unaligned:  # holds names, not layers, so that each unpadded weight is freed before the next is padded
        linear_layer: Any = model.get_submodule(name)
        model.set_submodule(name, AlignedLinear(linear_layer))
    return len(unaligned)


def _unaligned(module: nn.Linear) -> bool:
    plain = type(module.weight) is nn.Parameter  # neither quantised nor a DTensor
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if not plain or hooked:
        return False
    sizes = [width * module.weight.element_size() for width in module.weight.shape]
    return module.weight.device.type != "meta" and any(size % ROW_BYTES for size in sizes)


def _plain_again(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, AlignedLinear):
            model.set_submodule(name, module.plain())


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return functools.partial(_plain_again, model) if align_linears(model) else None


CHANGE = Change(
    name="padded linear layers", apply=_apply, applies_to=lambda setting: setting.replaces_modules, judged=True
)
