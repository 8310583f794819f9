"""Every format beyond transformers' own that this project reads: which model types mean it, and what reads it."""

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
from sbeval.checkpoints.moduleformer import MODEL_TYPE as MODULEFORMER_TYPE
from sbeval.checkpoints.moduleformer import read_moduleformer
from sbeval.checkpoints.moduleformer_model import ModuleFormerForCausalLM
from sbeval.models import SbevalForCausalLM

CheckpointReader = Callable[[Mapping[str, Any], Weights, KvExpand], tuple[str, Any, dict[str, Tensor]]]
"""From the contents of `config.json`, the tensors, and how grouped heads share keys and values, to the format's full
name, the configuration of `model_class`, and its tensors by name.

It raises a UserError where a part is not supported, or a tensor is missing, misshapen or has no place in the layout.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFormat:
    """A checkpoint format.

    Attributes:
        model_types: entries `model_type` of `config.json` that mean this format.
        extendable: whether what it becomes can be trained and saved again.
        takes_kv_expand: whether one can choose how grouped heads share keys and values.
    """

    model_types: tuple[str, ...]
    read: CheckpointReader
    model_class: type[PreTrainedModel] = SbevalForCausalLM
    extendable: bool = True
    takes_kv_expand: bool = False


FORMATS = (
    CheckpointFormat(
        model_types=(*FLAT_TYPES, *BLOCK_TYPES),
        read=lambda source, weights, kv_expand: read_dolomite(read_dolomite_config(source), weights, kv_expand),
        takes_kv_expand=True,
    ),
    CheckpointFormat(model_types=FLA_TYPES, read=lambda source, weights, kv_expand: read_fla(source, weights)),
    CheckpointFormat(
        model_types=(MODULEFORMER_TYPE,),
        read=lambda source, weights, kv_expand: read_moduleformer(source, weights),
        model_class=ModuleFormerForCausalLM,
        extendable=False,
    ),
)


def format_of_type(model_type: str) -> CheckpointFormat | None:
    """Returns the format that a model type means, None where transformers loads it itself."""
    return next((known for known in FORMATS if model_type in known.model_types), None)
