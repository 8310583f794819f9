"""Converts the tensors of dolomite-engine and lm-engine checkpoints to those of an sbeval model.

Shape suffixes: H query heads, G key/value heads, R query heads of a key/value head (H / G), D head_dim, E hidden_size.
"""

import logging

import torch
from torch import Tensor

from sbeval.checkpoints.dolomite.config import DolomiteConfig, family_layers
from sbeval.checkpoints.dolomite.layers import DolomiteMLP, same_in_all_layers
from sbeval.checkpoints.facts import KvExpand
from sbeval.checkpoints.files import Weights
from sbeval.errors import UserError
from sbeval.models import SbevalConfig
from sbeval.models.config import GATED_ACTIVATIONS

# a child of lm-eval's logger, whose level is INFO; info lines of other loggers are not shown
_LOG = logging.getLogger("lm_eval.sbeval.checkpoints")


_HAS = {True: "has", False: "lacks"}


def read_dolomite(
    source: DolomiteConfig, weights: Weights, kv_expand: KvExpand
) -> tuple[str, SbevalConfig, dict[str, Tensor]]:
    """Reads the tensors of a dolomite checkpoint.

    `kv_expand` says which key/value head stick-breaking query head q uses: "interleave" q // R, "tile" q % G, and
    "auto" follows the generation of the checkpoint.

    Returns:
        The name of the format, the configuration, and the state dict of `SbevalForCausalLM`.

    Raises:
        UserError: a tensor is missing, has a wrong shape or is unknown, or layers differ in an unsupported way.
    """
    if "transformer.wpe.weight" in weights:
        raise UserError("learned absolute positions (transformer.wpe.weight) are not supported")
    mixer, mlp = ("sequence_mixer", "mlp_block") if source.blocks else ("attn", "mlp")
    mlp_names = ["moe" if layer.num_experts and not source.blocks else mlp for layer in source.mlps]
    layers = [f"transformer.h.{layer}" for layer in range(len(source.mixers))]
    stickbreaking = [index for index, layer in enumerate(source.mixers) if layer.kind == "stickbreaking"]

    def everywhere(name: str) -> bool:
        has = {layer: f"{layers[layer]}.{name}" in weights for layer in stickbreaking}
        return bool(has) and same_in_all_layers(has, f"presence of {name}")

    has_head_bias = everywhere(f"{mixer}.head_bias")
    has_norm = everywhere(f"{mixer}.norm.weight")
    if source.blocks and stickbreaking and not (has_head_bias and has_norm):
        raise UserError(
            f"layer {stickbreaking[0]} lacks {mixer}.head_bias or {mixer}.norm, which stick-breaking layers of "
            "generation C have: complete the download or save the checkpoint again"
        )
    if source.has_head_norm not in (None, has_norm):
        raise UserError(
            f"head_norm is {source.has_head_norm} in config.json, but the checkpoint has "
            f"{'tensors' if has_norm else 'no tensors'} named {mixer}.norm; correct the configuration"
        )
    remainder = "none" if not source.has_remainder else "head_bias" if has_head_bias else "value"
    modules = [(f"{layer}.{mixer}", f"{layer}.{name}") for layer, name in zip(layers, mlp_names, strict=True)]
    config = SbevalConfig(
        bias=_biases(source, weights, modules),
        **source.fields,
        **family_layers(source, remainder=remainder, head_norm=has_norm),
    )
    generation = _generation(source, has_head_bias, has_norm)
    tiled = _is_tiled(source, generation, kv_expand)
    tensors = _model_tensors(config, weights)
    for layer, name in enumerate(layers):
        layer_config, place = config.of_layer(layer), f"model.layers.{layer}"
        for ours, theirs in (("input_norm", "ln_1"), ("post_attention_norm", "ln_2")):
            tensors.update(_norm(config, weights, f"{name}.{theirs}", f"{place}.{ours}"))
        order_H = _head_order(layer_config, tiled=tiled and layer in stickbreaking)
        for key, tensor in _attention_tensors(layer_config, weights, f"{name}.{mixer}", order_H).items():
            tensors[f"{place}.self_attn.{key}"] = tensor
        for key, tensor in mlp_tensors(layer_config, source.mlps[layer], weights, f"{name}.{mlp_names[layer]}").items():
            tensors[f"{place}.mlp.{key}"] = tensor
        if layer in stickbreaking and remainder != "head_bias" and has_head_bias:
            weights.drop([f"{name}.{mixer}.head_bias"])
    if config.tie_word_embeddings:
        weights.check_tied_head(tensors["model.embed_tokens.weight"])
    weights.refuse_left_over(f"dolomite {generation}")
    return f"dolomite:{generation}", config, tensors


def _biases(source: DolomiteConfig, weights: Weights, modules: list[tuple[str, str]]) -> list[str]:
    """Returns which linear layers have a bias; `modules` are the names of each layer's attention and MLP.

    Raises:
        UserError: tensors and configuration disagree, layers differ, or experts have a bias, which means different
            things in two public versions of lm-engine.
    """
    stated: dict[str, list[tuple[str, bool | None]]] = {"qkv": [], "output": [], "mlp": []}
    for (attention, inner), mixer, mlp in zip(modules, source.mixers, source.mlps, strict=True):
        stated["qkv"].append((f"{attention}.c_attn.bias", mixer.qkv_bias))
        stated["output"].append((f"{attention}.c_proj.bias", mixer.output_bias))
        name = f"{inner}.c_proj.bias"
        stated["mlp"].append((name, mlp.bias))
        if mlp.num_experts and (name in weights or mlp.bias):
            raise UserError(f"experts with biases ({name}, add_bias) are not supported; supported are experts without")
    present = {maps: [name in weights for name, _ in names] for maps, names in stated.items()}
    for maps, names in stated.items():
        for (name, configured), has in zip(names, present[maps], strict=True):
            if configured not in (None, has):
                raise UserError(
                    f"add_bias is {configured} in config.json, but the checkpoint {_HAS[has]} {name}; correct the "
                    "configuration"
                )
    return [maps for maps, has in present.items() if same_in_all_layers(has, f"presence of a bias of {maps}")]


def _generation(source: DolomiteConfig, has_head_bias: bool, has_norm: bool) -> str:
    mixed = " mixture" if any(mlp.num_experts for mlp in source.mlps) else ""
    if all(mixer.kind == "softmax" for mixer in source.mixers):
        return ("C'' softmax" if source.model_type == "gpt_base" else "softmax") + mixed
    if source.blocks:
        return ("C''" if source.model_type == "gpt_base" else "C") + mixed
    if has_norm:
        return f"A4{mixed}"
    if has_head_bias:
        return ("A3" if source.mixers[0].num_attention_heads != source.mixers[0].num_key_value_heads else "A2") + mixed
    return f"A1{mixed}"


def _is_tiled(source: DolomiteConfig, generation: str, kv_expand: KvExpand) -> bool:
    stickbreaking = [mixer for mixer in source.mixers if mixer.kind == "stickbreaking"]
    if kv_expand not in ("auto", "interleave", "tile"):
        raise UserError(f"kv_expand must be auto, interleave or tile, got {kv_expand!r}")
    if not any(1 < mixer.num_key_value_heads < mixer.num_attention_heads for mixer in stickbreaking):
        return False
    if kv_expand != "auto":
        _LOG.info("kv_expand=%s, as set by the user", kv_expand)
        return kv_expand == "tile"
    if generation.startswith("A"):
        _LOG.info("kv_expand=auto chooses tile, which all checkpoints of dolomite's generation %s use", generation)
        return True
    until = "until March 2025" if source.model_type == "gpt_dolomite" else "where it ran without packed texts"
    _LOG.warning(
        "kv_expand=auto chooses interleave, but dolomite's generation %s tiled its grouped heads %s and interleaved "
        "them otherwise, and the checkpoint does not record which; compare the NLL of a text with kv_expand=tile",
        generation,
        until,
    )
    return False


def _model_tensors(config: SbevalConfig, weights: Weights) -> dict[str, Tensor]:
    shape = (config.vocab_size, config.hidden_size)
    tensors = {"model.embed_tokens.weight": weights.take("transformer.wte.weight", shape)}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = weights.take("lm_head.weight", shape)
    return {**tensors, **_norm(config, weights, "transformer.ln_f", "model.norm")}


def _norm(config: SbevalConfig, weights: Weights, theirs: str, ours: str) -> dict[str, Tensor]:
    kinds = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return {f"{ours}.{tensor}": weights.take(f"{theirs}.{tensor}", (config.hidden_size,)) for tensor in kinds}


def _head_order(config: SbevalConfig, *, tiled: bool) -> Tensor:
    """Returns [H]: each sbeval query head's index in the checkpoint; sbeval keeps heads of one key head adjacent."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return torch.arange(heads).view(heads // groups, groups).T.flatten() if tiled else torch.arange(heads)


def _attention_tensors(config: SbevalConfig, weights: Weights, name: str, order_H: Tensor) -> dict[str, Tensor]:
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    head_dim = config.head_dim
    width = heads * head_dim
    per_group = heads // groups
    rows = (heads * (1 + config.attention_gate) + 2 * groups) * head_dim
    tensors: dict[str, Tensor] = {}
    for part in ("weight", "bias") if "qkv" in config.bias else ("weight",):
        shape = (rows, config.hidden_size) if part == "weight" else (rows,)
        grouped = weights.take(f"{name}.c_attn.{part}", shape).view(groups, -1, head_dim, *shape[1:])
        tensors[f"q_proj.{part}"] = grouped[:, :per_group].flatten(0, 1)[order_H].flatten(0, 1)
        tensors[f"k_proj.{part}"] = grouped[:, per_group].flatten(0, 1)
        tensors[f"v_proj.{part}"] = grouped[:, per_group + 1].flatten(0, 1)
        if config.attention_gate:
            tensors[f"head_gate.{part}"] = grouped[:, per_group + 2 :].flatten(0, 2)
    output = weights.take(f"{name}.c_proj.weight", (config.hidden_size, width))
    tensors["o_proj.weight"] = output.view(-1, heads, head_dim)[:, order_H].flatten(1)
    if "output" in config.bias:
        tensors["o_proj.bias"] = weights.take(f"{name}.c_proj.bias", (config.hidden_size,))
    if config.remainder == "head_bias":
        tensors["mixer.head_bias"] = weights.take(f"{name}.head_bias", (heads, head_dim))[order_H]
    if config.head_norm:
        for part in ("weight", "bias"):
            norm = weights.take(f"{name}.norm.{part}", (width,))
            tensors[f"head_norm.{part}"] = norm.view(heads, head_dim)[order_H].flatten()
    return tensors


def mlp_tensors(config: SbevalConfig, mlp: DolomiteMLP, weights: Weights, name: str) -> dict[str, Tensor]:
    """Returns the state dict of a layer's MLP; `name` is the name of the module in the checkpoint.

    Raises:
        UserError: a tensor is missing or has a wrong shape.
    """
    hidden = config.hidden_size
    names = (f"{name}.c_fc", f"{name}.c_proj")
    if mlp.num_experts is None:
        return _maps(config, weights, names, (mlp.intermediate_size,), interleaved=mlp.interleaved)
    tensors = {"router.weight": weights.take(f"{name}.gate.weight", (mlp.num_experts, hidden))}
    if mlp.balanced_experts:
        tensors["balance"] = weights.take(f"{name}.bias", (mlp.num_experts,))
    tensors |= _maps(config, weights, names, (mlp.num_experts, mlp.intermediate_size), interleaved=mlp.interleaved)
    if mlp.shared_intermediate_size is not None:
        names = (f"{name}.c_fc_shared", f"{name}.c_proj_shared")
        shared = _maps(config, weights, names, (mlp.shared_intermediate_size,), interleaved=mlp.shared_interleaved)
        tensors |= {f"shared.{key}": tensor for key, tensor in shared.items()}
    if mlp.shared_expert_gating:
        tensors["shared_gate.weight"] = weights.take(f"{name}.shared_expert_gate.weight", (1, hidden))
    return tensors


def _maps(
    config: SbevalConfig, weights: Weights, names: tuple[str, str], sizes: tuple[int, ...], *, interleaved: bool
) -> dict[str, Tensor]:
    """Returns the projections of an MLP, or of all experts; `sizes` are ([experts,] hidden width)."""
    *experts, width = sizes
    first, last = names
    gated = config.activation in GATED_ACTIVATIONS
    inner = width * (2 if gated else 1)
    hidden = config.hidden_size
    tensors = {"down_proj.weight": weights.take(f"{last}.weight", (*experts, hidden, width))}
    if "mlp" in config.bias:
        tensors["down_proj.bias"] = weights.take(f"{last}.bias", (*experts, hidden))
    for part in ("weight", "bias") if "mlp" in config.bias else ("weight",):
        both = weights.take(f"{first}.{part}", (*experts, inner, hidden) if part == "weight" else (*experts, inner))
        if not gated:
            tensors[f"up_proj.{part}"] = both
            continue
        rows = both.movedim(len(experts), 0)
        up, gate = (rows[1::2], rows[::2]) if interleaved else rows.chunk(2)
        tensors[f"up_proj.{part}"], tensors[f"gate_proj.{part}"] = (x.movedim(0, len(experts)) for x in (up, gate))
    return tensors
