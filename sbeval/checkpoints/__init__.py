"""Reads checkpoints of other projects: recognises the format and loads the weights into a model.

- `registry`: the table of formats; a new format is a reader and an entry there
- `load`: finds, recognises and loads a checkpoint, also with transformers' own loading
- `convert`: writes a checkpoint in the sbeval format
- `facts`: format, training length and longest input, from a configuration
- `argument_names`: names of arguments that a checkpoint's model could read, for finding misspelt ones
- `files`: opens the weight files, checks that they are complete, and reads single tensors
- `unread`: tensors of a checkpoint that the loaded model does not read
- `values`: checks the types of values in config.json, and that the weight files are large enough for them
- `versions`: checks that transformers is new enough for a feature
- `ignored`: keys of config.json that do not affect evaluation
- `quiet`: silences transformers' log and progress bars
- `dolomite`: checkpoints of dolomite-engine and lm-engine
- `fla`: stick-breaking models of flash-linear-attention, and the Forgetting Transformer
- `fox_stickbreaking`: stick-breaking checkpoints of a fork of the Forgetting Transformer
- `moduleformer`: checkpoints of ModuleFormer (MoLM)
- `moduleformer_model`: ModuleFormer's model, for evaluation

The format is recognised by the `model_type` in config.json, so nothing else is downloaded to find out. A reader
returns a configuration and tensors, `load` makes an `SbevalForCausalLM` of them, and the lm-eval adapter passes that
model to lm-eval's `hf`. So scoring, batching
and generation are the same code for every format. Only ModuleFormer has a model class of its own.

No key of config.json and no tensor is silently ignored: a key that is neither read nor listed as harmless, and a tensor
that the model does not read, are errors (`ignored`, `unread`). `sbeval inspect` runs the same readers on the meta
device, so it reports missing or unsupported parts with the messages of loading.

Importing this package does not import torch: the names below are resolved when first used.
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
