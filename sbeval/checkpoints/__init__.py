"""Every checkpoint format this project reads, found by looking at the files.

- `registry`: which formats are there? A new one is a reader and an entry here
- `load`: how is a checkpoint found and loaded?
- `convert`: how is one written out in this project's form?
- `facts`: what does a configuration say of format, training length and longest input?
- `argument_names`: which arguments could a checkpoint's model read, as far as sources tell?
- `files`: are the files whole, and what tensors do they hold?
- `unread`: which tensors does a loaded model not read, and which may it leave unread?
- `values`: are a configuration's values of their kinds, and can the files hold so much?
- `ignored`: which keys of a configuration change nothing at evaluation?
- `quiet`: how does transformers say less?
- `dolomite`: how is dolomite-engine's read?
- `fla`: how are flash-linear-attention's stick-breaking model and the Forgetting Transformer read?
- `moduleformer`: how is ModuleFormer read?
- `moduleformer_model`: what is its model?

Importing this package imports no torch: the names below are resolved when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbeval.checkpoints.convert import convert_checkpoint
    from sbeval.checkpoints.load import LoadedCheckpoint, load_checkpoint

__all__ = ["LoadedCheckpoint", "convert_checkpoint", "load_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sbeval.checkpoints' has no attribute {name!r}")
    module = "convert" if name == "convert_checkpoint" else "load"
    return getattr(import_module(f"sbeval.checkpoints.{module}"), name)
