"""Tiny random models of transformers' families, each against whole texts read without a cache; `make families`.

Every family of causal language models is tried whose code caches more than plain keys and values, or whose layers or
positions differ: 5 prompts, 32 tokens, in a batch of 8 and alone, and the scores of texts that share beginnings. The
most used are tests of every change. A family without a tiny configuration here says why.
"""

import argparse
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from sbeval.errors import UserError, first_line  # noqa: E402
from sbeval.model_adapters.lm import StickBreakingLM  # noqa: E402
from sbeval.model_adapters.self_test import outcome as names  # noqa: E402
from tests.model_adapters.small import LINES, SIZES, generated, likelihoods, load_lm, tiny_tokenizer  # noqa: E402

PROMPTS = ["Beautiful is", "Simple is better than", "Now is", LINES[-3], "There should be one"]
PAIRS = [("\n".join(LINES[:6]) + end, line) for end in ("", " ", "\nNow") for line in ("\nSparse is better", " is")]

SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
INDEXED = {"o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 8, "mlp_layer_types": ["moe"] * 4}
_SLIDING = ["sliding_attention", "full_attention"] * 2
COMPRESSED = ["compressed_sparse_attention", "heavily_compressed_attention"]
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("llama", "qwen3", "phi3")},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": GROUPED,
    "deepseek_v3": {"q_lora_rank": 16, **LATENT, **GROUPED},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    "qwen3_next": {"num_experts": 4, "head_dim": 32, "shared_expert_intermediate_size": 32, **DELTA, **EXPERTS},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_ff_dim": 48},
    "mamba": {"state_size": 8},
    "falcon_h1": {**SSM, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "granitemoehybrid": SSM
    | {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "shared_intermediate_size": 32},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8},
    },
    "minimax": {
        **{"num_local_experts": 4, "block_size": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    },
    "deepseek_v4": {
        **{"q_lora_rank": 16, "n_routed_experts": 4, "num_key_value_heads": 1, "head_dim": 16, **INDEXED, **EXPERTS},
        **{"sliding_window": 16, "layer_types": ["sliding_attention", *COMPRESSED, COMPRESSED[0]]},
    },
}
OF_MAKE_TEST = ("gemma3_text", "deepseek_v3", "llama4_text", "mamba")
"""One of each kind of layer and cache: the families that `make test` tries; `make test-all` tries all of `FAMILIES`."""

# the checks of the self-test that find something in a family, where any does
FAILED: dict[str, set[str]] = {
    **{"mamba": {names.SEVERAL}, "deepseek_v4": {names.LEFT_PADDING}},
    "minimax": {names.SEVERAL, names.LENGTH, names.LEFT_PADDING},
}

_KINDS = (
    *("Cache(", "sliding_window", "layer_types", "mamba", "linear_attention", "attention_chunk", "sinks", "kv_lora"),
    *("indexer", "no_rope", "recurrent", "conv1d", "conv_l", "compress_ra", "block_types"),
)
_MOST_SECONDS = 120
# YaRN has no ramp for two channels
_PARTLY_ROTATED = {"mimo_v2_flash", "qwen3_5_text", "qwen3_5_moe_text"}
# what configurations call their sizes
SMALL: dict[str, Any] = {
    **dict.fromkeys(("n_embd", "d_model", "embed_dim", "embedding_size", "lru_width", "rnn_width"), 32),
    **dict.fromkeys(("ffn_dim", "ffn_hidden_size", "n_inner", "block_ff_dim", "shared_intermediate_size"), 48),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("n_head", "n_heads"), 4),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "index_topk"), 16),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "index_n_heads", "o_groups"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "state_size", "mamba_dt_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_head_dim", "mamba_d_state"), 8),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "swa_head_dim"), 8
    ),
    **{"mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_n_groups": 1, "query_pre_attn_scalar": 8, "num_heads": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "pad_token_id": 2, "max_position_embeddings": 512},
    **{"attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "num_hidden_layers": 4, "block_size": 8},
}
_BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
# what no size above says: experts that a default lacks, layers that share keys, an index, words of several tokens
OTHERS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _SLIDING}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "layer_types": _SLIDING},
    "dots3_note_text": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "head_dim": 16, "q_lora_rank": 16},
        "shared_experts_intermediate_size": 32,
    },
    "gemma3n_text": _BY_LAYER | {"num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**_BY_LAYER, "num_kv_shared_layers": 2},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16, "head_dim": 32},
        **{"indexer_compress_ratio": 4, "ple_layer_ids": [3], "eos_token_id": 1, "ngram_vocab_size_base": 512},
        "hc_lowrank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def families() -> list[str]:
    """Returns the model types whose code or configuration names a kind of cache, of layer or of position."""
    chosen = []
    for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            kind = getattr(transformers, model)
            text = inspect.getsource(importlib.import_module(kind.__module__)) + inspect.getsource(kind.config_class)
        except Exception:
            continue
        plain = text.replace("EncoderDecoderCache(", "").replace("DynamicCache(", "")
        if any(word in plain for word in _KINDS) and "GenerationMixin" in text:
            chosen.append(name)
    return sorted({*chosen, *FAMILIES})


def tiny_config(family: str, vocabulary: int) -> Any:
    """Returns a configuration of few and small layers, with every kind of layer of the default one."""
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": 4}
    if family in FAMILIES:
        sizes |= FAMILIES[family]
    else:
        default = transformers.AutoConfig.for_model(family)
        default.allow_global_per_layer_attribute_access = True
        if getattr(default, "is_encoder_decoder", False) or getattr(default, "text_config", None) is not None:
            raise UserError("a part of a larger model")
        if getattr(default, "is_decoder", None) is False:
            raise UserError("an encoder by default")

        def follows(name: str) -> bool:
            return isinstance(getattr(type(default), default.attribute_map.get(name, name), None), property)

        sizes = {name: value for name, value in sizes.items() if not follows(name)}
        for name, size in SMALL.items():
            there = getattr(default, name, None) is not None or (isinstance(size, list) and hasattr(default, name))
            sizes |= {name: size} if there and not follows(name) else {}
        if getattr(default, "kv_lora_rank", None):
            sizes |= {"num_key_value_heads": 4, "head_dim": 8}
        sizes |= {"head_dim": 32} if family in _PARTLY_ROTATED else {}
        for name in ("layer_types", "layers_block_type", "block_types"):
            if not follows(name) and (kinds := list(dict.fromkeys(getattr(default, name, None) or ()))):
                sizes[name] = [kinds[place % len(kinds)] for place in range(4 if len(kinds) != 3 else 6)]
                sizes["num_hidden_layers"] = len(sizes[name])
        sizes |= OTHERS.get(family, {})
    return transformers.AutoConfig.for_model(family, **{**sizes, "vocab_size": vocabulary})


def save_tiny(family: str, folder: Path, *, seed: int = 0, **sizes: int) -> None:
    """Writes a model of random weights, large enough that answers differ."""
    tokenizer = tiny_tokenizer(adds_bos=False)
    config = tiny_config(family, len(tokenizer))
    config.update(sizes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if (size := sum(parameter.numel() for parameter in model.parameters())) > 5_000_000:
        raise UserError(f"{size:,} parameters")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def whole_answers(lm: StickBreakingLM, prompts: Sequence[str], tokens: int = 12) -> list[str]:
    """The most probable answers, each token after a pass over the whole text alone."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([lm.tok_encode(prompt)])
        start, end = ids.shape[1], lm.tokenizer.eos_token_id
        while ids.shape[1] < start + tokens and ids[0, -1] != end:
            ids = torch.cat([ids, lm.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        answers.append(lm.tokenizer.decode(ids[0, start:], skip_special_tokens=True))
    return answers


@torch.no_grad()
def whole_scores(lm: StickBreakingLM, pairs: Sequence[tuple[str, str]]) -> list[float]:
    scores = []
    for context, continuation in pairs:
        before, after = lm._encode_pair(context, continuation)
        ids = torch.tensor([before + after])
        logprobs = lm.model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)[-len(after) :]
        scores.append(float(logprobs.gather(1, ids[0, -len(after) :, None]).sum()))
    return scores


def answers_of(lm: StickBreakingLM, tokens: int = 12) -> list[str]:
    return generated(lm, [(prompt, {"until": [], "max_gen_toks": tokens, "num_beams": 1}) for prompt in PROMPTS])


def compared(family: str, folder: Path) -> list[str]:
    """Returns a family's row of the table."""
    save_tiny(family, folder)
    lm, alone = load_lm(folder, batch_size=8), load_lm(folder, batch_size=1)
    assert lm.session is not None
    found = lm.session.self_test
    expected = whole_answers(lm, PROMPTS, 32)
    right = [sum(map(str.__eq__, answers_of(model, 32), expected)) for model in (lm, alone)]
    scored = "refused"
    if found.scoring != "refused":
        apart = max(abs(a - b) for a, b in zip(likelihoods(lm, PAIRS), whole_scores(lm, PAIRS), strict=True))
        scored = "yes" if apart < 1e-3 else f"off by {apart:.2g} nats"
    answered = "yes" if right == [len(PROMPTS)] * 2 else f"{right[0]} of 5, {right[1]} alone"
    attention = "none" if names_no_attention(lm) else str(getattr(lm.model.config, "_attn_implementation", None))
    attention = attention.removeprefix("sbeval_visible_keys_")
    return [family, scored, answered, found.untested or found.ways() or "nothing", attention, scalings(lm, folder)]


def names_no_attention(lm: StickBreakingLM) -> bool:
    kinds = {type(module).__name__.lower() for module in lm.model.modules()}
    return not any("attention" in kind or "mla" in kind for kind in kinds)


def scalings(lm: StickBreakingLM, folder: Path) -> str:
    """Returns which RoPE scalings change a score."""
    reached, plain = [], likelihoods(lm, PAIRS[:1]) if lm.session and lm.session.self_test.scoring != "refused" else []
    for kind in ("linear", "dynamic", "yarn"):
        try:
            scaled = load_lm(folder, rope_scaling=f"{kind}:4", training_length=16, self_test=False)
            reached += [kind] if plain and likelihoods(scaled, PAIRS[:1]) != plain else []
        except UserError:
            reached += [f"{kind} refused"]
    refused = len(reached) == 3 and all("refused" in word for word in reached)
    return "refused" if refused else ", ".join(reached) or "none"


class TooLongError(Exception):
    """A family takes too long, which is no refusal."""


def _too_long(*_: object) -> None:
    raise TooLongError(f"takes more than {_MOST_SECONDS} seconds")


def documented() -> set[str]:
    """Returns the families of the table in the documentation."""
    text = (Path(__file__).parents[2] / "docs/reference/formats.md").read_text(encoding="utf-8")
    table = text[text.index("| family | scored |") :].split("\n\n")[0]
    return {name for line in table.splitlines() for name in re.findall("`(.+?)`", line.split("|")[1])}


def is_right(row: Sequence[str]) -> bool:
    """Whether a family's row is as it should be."""
    return row[1] in ("yes", "refused") and row[2] == "yes"


def main() -> None:
    """Prints the table, of the families named or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    signal.signal(signal.SIGALRM, _too_long)
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    print(f"| family | scored | generated | what the self-test changes | attention | RoPE scaling |\n|{'---|' * 6}")
    wrong, missing = [], []
    named = parser.parse_args().families
    needed = set(named) or documented() | set(FAMILIES)
    for family in named or sorted({*families(), *needed}):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SBEVAL_CACHE"] = folder
            signal.alarm(_MOST_SECONDS)
            try:
                row = compared(family, Path(folder) / "model")
            except Exception as error:  # models' code raises anything
                missing.append(f"{family}: {first_line(error)}"[:160])
                wrong += [family] if family in needed else []
                continue
            finally:
                signal.alarm(0)
        print(f"| {' | '.join(row)} |", flush=True)
        wrong += [] if is_right(row) else [family]
    print(f"\nNot run:\n{chr(10).join(missing)}")
    if wrong:
        raise SystemExit(f"not run, or other answers or scores than those of whole texts: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
