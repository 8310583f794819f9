"""Linear maps whose widths a GPU's matrix units cannot read in one piece, padded to widths they can.

The fast kernels read rows that start at multiples of 16 bytes. A Llama-style MLP with 2730 channels in bf16 has none,
and its products fall back to slower ones. Rows and columns of zeros change no sum; they are added once, after loading.
"""

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from sbeval.model_adapters.prepare.change import Change, Setting, Undo

ROW_BYTES = 16
_WIDTH_BYTES = 128  # a whole cache line, once there is padding at all


class AlignedLinear(nn.Linear):
    """A linear map with a padded weight; `weight` and `bias` are views of it in their own shapes.

    Writing into them changes the map. Others put in their place (a merged adapter, another dtype or device, a state
    dict) are padded when it is next called.
    """

    _padded_weight: Tensor
    _padded_bias: Tensor | None

    def __init__(self, of: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = of.in_features, of.out_features
        self.weight = nn.Parameter(of.weight.detach(), requires_grad=False)
        self.register_parameter("bias", None)
        if of.bias is not None:
            self.bias = nn.Parameter(of.bias.detach(), requires_grad=False)
        self._pad()
        self.train(of.training)

    @property
    def padded_in_features(self) -> int:
        """Width of an input that needs no copy: `in_features` values and zeros behind them."""
        self._follow_parameters()
        return int(self._padded_weight.shape[1])

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features or padded_in_features] to [..., out_features], a view of the padded product."""
        columns = self.padded_in_features - input.shape[-1]
        output = linear(pad(input, (0, columns)) if columns else input, self._padded_weight, self._padded_bias)
        return output[..., : self.out_features]

    def _follow_parameters(self) -> None:
        if torch.compiler.is_compiling():
            return
        kept = self.weight.data_ptr() == self._padded_weight.data_ptr()
        if self.bias is None or self._padded_bias is None:
            kept = kept and self.bias is self._padded_bias
        else:
            kept = kept and self.bias.data_ptr() == self._padded_bias.data_ptr()
        if not kept:
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
        """Returns an ordinary linear map with the same parameters."""
        linear_map = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear_map.weight, linear_map.bias = self.weight, self.bias
        return linear_map.train(self.training)


def align_linears(model: nn.Module) -> int:
    """Replaces every linear map of a model whose widths are not aligned, and returns how many that were.

    Maps that share their weight with another module, that have hooks or a forward of their own, or that are or hold
    something of a special class (adapters, quantised or distributed weights) are left as they are.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    linears = ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
    found = [name for name, module in linears if owners[id(module.weight)] == 1 and _unaligned(module)]
    for name in found:  # by name, so that a map's own weight is freed before the next one is padded
        own: Any = model.get_submodule(name)
        model.set_submodule(name, AlignedLinear(own))
    return len(found)


def _unaligned(module: nn.Linear) -> bool:
    plain = type(module.weight) is nn.Parameter  # neither quantised nor spread over devices
    hooked = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks  # accelerate's, or others'
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


CHANGE = Change(name="padded linear layers", apply=_apply, wanted=lambda setting: setting.replaces_parts, judged=True)
