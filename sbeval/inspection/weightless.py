"""A checkpoint put together on the meta device: every tensor has its shape and dtype, and none has been read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sbeval.checkpoints import load_whole, register_fla_models
from sbeval.checkpoints.facts import KvExpand, checkpoint_format
from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.load import build
from sbeval.checkpoints.registry import format_of_type
from sbeval.errors import UserError, first_line, raised_here, shown

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Headers(Weights):
    """The tensors of a checkpoint as their headers describe them."""

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return sorted(self._file_of)

    def _read(self, name: str) -> Tensor:
        path = self._path(name)
        if name in self._pickled:  # mapped into memory, not read
            return torch.empty_like(self._pickled[name], device="meta")
        with safe_open(path, framework="pt") as file:
            described = file.get_slice(name)
            kind = described.get_dtype()
        if kind not in _DTYPES:
            raise UserError(f"{name} holds numbers of the type {shown(kind)}, which is not supported")
        return torch.empty(self.shape(name), dtype=_DTYPES[kind], device="meta")


def assemble(
    folder: Path, source: Mapping[str, Any], headers: Headers, kv_expand: KvExpand = "auto"
) -> tuple[str, PreTrainedModel]:
    """Returns the format's full name and the model without its weights, put together as loading does it.

    Args:
        folder: of the checkpoint.
        source: the contents of its `config.json`.
        headers: of its weights, compared with the configuration's sizes already.
        kv_expand: how dolomite's grouped stick-breaking heads share keys and values.

    Raises:
        UserError: what loading would refuse: a part that is not supported, a tensor that is missing or misshapen.
    """
    released = format_of_type(str(source.get("model_type")))
    if released is not None:
        name, config, tensors = released.read(source, headers, kv_expand)
        return name, build(released.model_class, config, tensors, headers.dtype())
    register_fla_models()
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model: PreTrainedModel = load_whole(AutoModelForCausalLM, str(folder), dtype="auto", device_map="meta")
    except UserError:
        raise
    except Exception as error:  # a broken file is answered with any class
        if raised_here(error) or isinstance(error, MemoryError):
            raise
        raise UserError(f"transformers cannot load the checkpoint {folder}: {first_line(error)}") from error
    return checkpoint_format(model.config), model
