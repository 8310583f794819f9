"""Reads checkpoints of ModuleFormer (MoLM)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.fla import Names
from sbeval.checkpoints.ignored import MODULEFORMER
from sbeval.checkpoints.moduleformer_model import ModuleFormerConfig
from sbeval.checkpoints.values import ConfigValues
from sbeval.errors import UserError

MODEL_TYPE = "moduleformer"

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu",
}
_BUFFERS = ("attn.mask", "attn.cum_weight")


def read_moduleformer(source: Mapping[str, Any], weights: Weights) -> tuple[str, ModuleFormerConfig, dict[str, Tensor]]:
    """Reads a ModuleFormer configuration and its tensors.

    The training length is the longest context in training: a block (`block_size`) and the history before it
    (`history_length`).

    Returns:
        The name of the format, the configuration, and the state dict of `ModuleFormerForCausalLM`.

    Raises:
        UserError: a feature is not supported, or a tensor is missing, has a wrong shape or is unknown.
    """
    values = ConfigValues(source)
    config = ModuleFormerConfig(
        vocab_size=values.count("vocab_size", default=50295),
        hidden_size=values.count("n_embd", default=1024),
        num_hidden_layers=values.count("n_layer", default=24),
        num_attention_heads=values.count("n_head", default=8),
        attention_width=values.count("att_hidden", default=512),
        mlp_width=values.count("ffd_hidden", default=2048),
        attention_experts=values.count("n_att_experts", default=32),
        attention_chosen=values.count("k_att", default=2),
        mlp_experts=values.count("n_mlp_experts", default=32),
        mlp_chosen=values.count("k_mlp", default=2),
        gate=values.one_of("gate_type", ("mlp", "linear", "gmm"), "mlp"),
        gate_width=values.count("gating_size", default=256),
        activation=_ACTIVATIONS[values.one_of("activation_function", tuple(_ACTIVATIONS), "gelu_new")],
        max_position_embeddings=values.count("block_size", default=512) + values.count("history_length", default=512),
        bos_token_id=values.token("bos_token_id", 50256),
        eos_token_id=values.token("eos_token_id", 50256),
    )
    values.token("pad_token_id")
    values.refuse_unread(MODULEFORMER, whole=True)
    if config.attention_width % config.num_attention_heads:
        raise UserError(
            f"att_hidden {config.attention_width} must be a multiple of n_head {config.num_attention_heads}"
        )
    for key, chosen, experts in (
        ("k_att", config.attention_chosen, config.attention_experts),
        ("k_mlp", config.mlp_chosen, config.mlp_experts),
    ):
        if chosen > experts:
            raise UserError(f"{key} {chosen} is more than the number of experts, {experts}; correct the configuration")
    tensors = {ours: weights.take(theirs, shape) for ours, (theirs, shape) in _names(config).items()}
    # ModuleFormer stores an expert's matrix as (in, out), `Experts` as (out, in)
    tensors = {name: tensor.mT if name.endswith("experts.weight") else tensor for name, tensor in tensors.items()}
    weights.drop(f"transformer.h.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in _BUFFERS)
    weights.refuse_left_over("ModuleFormer")
    return MODEL_TYPE, config, tensors


def _names(config: ModuleFormerConfig) -> Names:
    """Maps tensor names of `ModuleFormerForCausalLM` to names and shapes in the checkpoint."""
    hidden, width = config.hidden_size, config.attention_width
    names: Names = {
        "model.wte.weight": ("transformer.wte.weight", (config.vocab_size, hidden)),
        "lm_head.weight": ("lm_head.weight", (config.vocab_size, hidden)),
    }
    for part in ("weight", "bias"):
        names[f"model.ln_f.{part}"] = (f"transformer.ln_f.{part}", (hidden,))
    block: Names = {}
    for name in ("attn.k_proj", "attn.v_proj"):
        block[f"{name}.weight"] = (f"{name}.weight", (width, hidden))
        block[f"{name}.bias"] = (f"{name}.bias", (width,))
    for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
        block[name] = (name, (hidden,))
    block |= _mixture_names(config, "attn.q_proj", config.attention_experts, width)
    block |= _mixture_names(config, "mlpf", config.mlp_experts, config.mlp_width)
    for layer in range(config.num_hidden_layers):
        for ours, (theirs, shape) in block.items():
            names[f"model.h.{layer}.{ours}"] = (f"transformer.h.{layer}.{theirs}", shape)
    return names


def _mixture_names(config: ModuleFormerConfig, name: str, experts: int, width: int) -> Names:
    hidden, gate_width = config.hidden_size, config.gate_width
    names: Names = {
        f"{name}.experts.weight": (f"{name}.experts.weight", (experts, hidden, width)),
        f"{name}.output_experts.weight": (f"{name}.output_experts.weight", (experts, width, hidden)),
    }
    gates: dict[str, Names] = {
        "mlp": {
            "hidden.weight": ("w_gate.0.weight", (gate_width, hidden)),
            "hidden.bias": ("w_gate.0.bias", (gate_width,)),
            "output.weight": ("w_gate.3.weight", (experts, gate_width)),
        },
        "linear": {"output.weight": ("w_gate.0.weight", (experts, hidden))},
        "gmm": {
            "hidden.weight": ("w_gate.weight", (gate_width, hidden)),
            "centroids": ("expert_centroids", (experts, gate_width)),
            "log_temperature": ("temperature", (1,)),
        },
    }
    for ours, (theirs, shape) in gates[config.gate].items():
        names[f"{name}.gate.{ours}"] = (f"{name}.gate.{theirs}", shape)
    return names
