"""Removes accelerate's hooks inside blocks, and keeps only the hook at the start of each block.

The hook of a block moves all inputs of the block to its device, so hooks of the block's submodules are redundant. They
are removed because a submodule with a hook is never replaced by a fused one.
"""

from typing import Any

from accelerate.hooks import remove_hook_from_module
from torch import nn

from sbeval.model_adapters.prepare.change import Change, Setting
from sbeval.model_adapters.prepare.spread import blocks_of, hooked_device, is_on_one_device


def settle_hooks(model: nn.Module) -> None:
    """Keeps only the hook at the start of each block, and moves RoPE frequencies (`inv_freq`) to the first block's GPU.

    A forward pass needs the frequencies before the first block. accelerate places them on the last GPU because the
    module that holds them comes last in the model.
    """
    blocks = blocks_of(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        if (device := hooked_device(block)) is None or not is_on_one_device(block):
            continue
        for module in list(block.modules()):
            if module is not block and hooked_device(module) == device:
                remove_hook_from_module(module)
                if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                    del module.forward  # accelerate leaves a copy of the class's forward; it is not a replacement
    if not blocks or (first := hooked_device(blocks[0])) is None:
        return
    for module in model.modules():
        angles = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        if angles and id(module) not in inside and hooked_device(module) not in (None, first):
            hook: Any = module._hf_hook
            hook.execution_device = first
            module.to(first)


def _apply(model: nn.Module, setting: Setting) -> None:
    settle_hooks(model)  # changes no value, so there is nothing to undo


CHANGE = Change(name="hooks of whole blocks", apply=_apply)
