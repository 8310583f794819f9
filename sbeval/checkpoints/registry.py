"""The table of checkpoint formats that sbeval reads itself; transformers loads all other formats.

Loading, conversion, context extension and the lm-eval adapter look formats up here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from sbeval.checkpoints.dolomite.config import BLOCK_TYPES, FLAT_TYPES, read_dolomite_config
from sbeval.checkpoints.dolomite.tensors import read_dolomite
from sbeval.checkpoints.facts import KvExpand
from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.fla import MODEL_TYPES as FLA_TYPES
from sbeval.checkpoints.fla import read_fla
from sbeval.checkpoints.fox_stickbreaking import is_fox_stickbreaking, read_fox_stickbreaking
from sbeval.checkpoints.moduleformer import MODEL_TYPE as MODULEFORMER_TYPE
from sbeval.checkpoints.moduleformer import read_moduleformer
from sbeval.checkpoints.moduleformer_model import ModuleFormerForCausalLM
from sbeval.models import SbevalForCausalLM

CheckpointReader = Callable[[Mapping[str, Any], Weights, KvExpand], tuple[str, Any, dict[str, Tensor]]]
"""Takes the contents of config.json, the weights and `kv_expand`; returns the full name of the format, the
configuration of `model_class`, and the tensors of its state dict.

Raises a UserError if a feature is not supported, or a tensor is missing, has a wrong shape or is unknown.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFormat:
    """A checkpoint format.

    Attributes:
        model_types: values of `model_type` in config.json that identify the format.
        read: converts configuration and tensors to those of `model_class`.
        model_class: class of the loaded model.
        extendable: whether the loaded model can be trained and saved, as for a context extension.
        takes_kv_expand: whether the option `kv_expand` applies.
    """

    model_types: tuple[str, ...]
    read: CheckpointReader
    model_class: type[PreTrainedModel] = SbevalForCausalLM
    extendable: bool = True
    takes_kv_expand: bool = False


def _read_dolomite_or_fox(
    source: Mapping[str, Any], weights: Weights, kv_expand: KvExpand
) -> tuple[str, Any, dict[str, Tensor]]:
    """Reads the formats that share the model type "stickbreaking"."""
    if is_fox_stickbreaking(source, weights):
        return read_fox_stickbreaking(source, weights)
    return read_dolomite(read_dolomite_config(source), weights, kv_expand)


FORMATS = (
    CheckpointFormat(model_types=(*FLAT_TYPES, *BLOCK_TYPES), read=_read_dolomite_or_fox, takes_kv_expand=True),
    CheckpointFormat(model_types=FLA_TYPES, read=lambda source, weights, kv_expand: read_fla(source, weights)),
    CheckpointFormat(
        model_types=(MODULEFORMER_TYPE,),
        read=lambda source, weights, kv_expand: read_moduleformer(source, weights),
        model_class=ModuleFormerForCausalLM,
        extendable=False,
    ),
)


def format_of_type(model_type: str) -> CheckpointFormat | None:
    """Returns the format of a model type, or None if transformers loads it."""
    return next((entry for entry in FORMATS if model_type in entry.model_types), None)
