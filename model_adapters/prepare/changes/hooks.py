"""accelerate's hooks, of which only the one at the start of each block stays.

A block's hook brings all that the block needs, and no part with a hook of its own is fused.
"""

from typing import Any

from accelerate.hooks import remove_hook_from_module
from torch import nn

from sbeval.model_adapters.prepare.change import Change, Setting
from sbeval.model_adapters.prepare.spread import blocks_of, hooked_device, lies_on_one_device


def settle_hooks(model: nn.Module) -> None:
    """Keeps only the hook at the start of each block, and moves tables of angles to the first block's device.

    Tables of angles are needed first but come last in the model, and so lie on the last GPU.
    """
    blocks = blocks_of(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        if (device := hooked_device(block)) is None or not lies_on_one_device(block):
            continue
        for module in list(block.modules()):
            if module is not block and hooked_device(module) == device:
                remove_hook_from_module(module)
                if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                    del module.forward  # what the hook stood in for, and no change of the class's
    if not blocks or (first := hooked_device(blocks[0])) is None:
        return
    for module in model.modules():
        angles = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        if angles and id(module) not in inside and hooked_device(module) not in (None, first):
            hook: Any = module._hf_hook
            hook.execution_device = first
            module.to(first)


def _apply(model: nn.Module, setting: Setting) -> None:
    settle_hooks(model)  # it moves no number, and is not undone


CHANGE = Change(name="hooks of whole blocks", apply=_apply)
