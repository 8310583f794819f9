"""The model family: one Hugging Face decoder for stick-breaking attention and the softmax baselines.

Importing this package registers `model_type: "sbeval"` with AutoConfig, AutoModel and AutoModelForCausalLM.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sbeval.models.config import SbevalConfig
from sbeval.models.decoder import SbevalForCausalLM, SbevalModel
from sbeval.models.presets import preset
from sbeval.models.rope import RopeFrequencies, parse_rope_scaling
from sbeval.models.rope_scaling import held_rope_frequencies

AutoConfig.register("sbeval", SbevalConfig, exist_ok=True)
AutoModel.register(SbevalConfig, SbevalModel, exist_ok=True)
AutoModelForCausalLM.register(SbevalConfig, SbevalForCausalLM, exist_ok=True)

__all__ = [
    "RopeFrequencies",
    "SbevalConfig",
    "SbevalForCausalLM",
    "SbevalModel",
    "held_rope_frequencies",
    "parse_rope_scaling",
    "preset",
]
