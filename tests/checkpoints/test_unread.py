"""A model reads every tensor of its checkpoint, or the rest is declared by its class or allowed by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbeval.checkpoints.load import OLDEST_TRANSFORMERS_OF_FP8, load_checkpoint
from sbeval.checkpoints.unread import UnreadTensors, folded
from sbeval.errors import UserError
from sbeval.inspection.command import inspect
from sbeval.inspection.description import describe
from sbeval.training.command import extend_command

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BOS_AND_EOS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DEEPSEEK: dict[str, Any] = EXPERTS | {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 8}
DEEPSEEK |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}


def saved(
    folder: Path, model: Any, *, tensors: Mapping[str, Tensor] | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """Saves a model with more tensors and other settings than it has."""
    model.save_pretrained(folder)
    changed(folder, config or {})
    if tensors:
        held = load_file(folder / "model.safetensors")
        save_file(held | tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def changed(folder: Path, config: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def llama(**settings: Any) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **settings}))


def deepseek(**settings: Any) -> transformers.DeepseekV3ForCausalLM:
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**SIZES, **DEEPSEEK, **settings}))


def of_token_prediction(layer: int) -> dict[str, Tensor]:
    """What DeepSeek's layer of multi-token prediction has beside a block, and a part of the block."""
    shapes = {"eh_proj.weight": (32, 64), "enorm.weight": (32,), "hnorm.weight": (32,)}
    shapes |= {"input_layernorm.weight": (32,), "shared_head.head.weight": (64, 32)}
    shapes |= {f"mlp.experts.{expert}.gate_proj.weight": (16, 32) for expert in range(4)}
    return {f"model.layers.{layer}.{name}": torch.zeros(shape) for name, shape in shapes.items()}


def in_8_bits(folder: Path, *, quantised: bool) -> Path:
    """Saves a Llama whose products are in fp8 beside their scales, whose config.json may say so."""
    saved(folder, llama(hidden_size=128, intermediate_size=128))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name + "_scale_inv"] = scale.expand(tensors[name].shape[0] // 64, 2).clone()
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if quantised:
        changed(folder, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}})
    return folder


def cut_mixture(folder: Path) -> Path:
    config = transformers.MixtralConfig(**SIZES | {"num_hidden_layers": 3}, num_local_experts=4)
    return saved(folder, transformers.MixtralForCausalLM(config), config={"num_hidden_layers": 2})


def qwen2() -> transformers.Qwen2ForCausalLM:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


REFUSED: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "fewer layers": (
        lambda folder: saved(folder, llama(num_hidden_layers=4), config={"num_hidden_layers": 2}),
        18,
        "model.layers.2-3.input_layernorm.weight",
    ),
    "no biases": (
        lambda folder: saved(folder, llama(attention_bias=True), config={"attention_bias": False}),
        8,
        "model.layers.0-1.self_attn.k_proj.bias",
    ),
    "another model type": (
        lambda folder: saved(folder, qwen2(), config={"model_type": "llama"}),
        6,
        "model.layers.0-1.self_attn.k_proj.bias",
    ),
    "fewer layers of experts": (cut_mixture, 19, "model.layers.2.block_sparse_moe.experts.0-3.w1.weight"),
    "fewer layers of a model with multi-token prediction": (
        lambda folder: saved(
            folder, deepseek(num_hidden_layers=3), config={"num_hidden_layers": 1, "mlp_layer_types": ["dense"]}
        ),
        52,
        "model.layers.1-2.input_layernorm.weight",
    ),
    "quantised, unsaid": (
        lambda folder: in_8_bits(folder, quantised=False),
        14,
        "model.layers.0-1.mlp.down_proj.weight_scale_inv",
    ),
    "a head that nothing declares": (
        lambda folder: saved(folder, llama(), tensors={"v_head.summary.weight": torch.zeros(1, 32)}),
        1,
        "v_head.summary.weight",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_the_model_does_not_read_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, count, name = REFUSED[kind]
    folder = make(tmp_path)
    tensors = "1 tensor" if count == 1 else f"{count} tensors"
    with pytest.raises(UserError, match=rf"does not read {tensors} of .* \({name}.*\), .*: correct") as refused:
        load_checkpoint(folder, allow_unread=())
    assert "allow_unread=true" in str(refused.value)
    description = describe(folder)
    assert (description.format, str(refused.value)) == (None, description.problems[0])
    loaded = load_checkpoint(folder, allow_unread=("*",))
    assert len(loaded.unread.allowed) == count
    assert describe(folder, allow_unread=("*",)).unread == loaded.unread


@pytest.mark.parametrize("stored", ["pytorch_model.bin", "shards"])
def test_they_are_refused_in_every_kind_of_file(stored: str, tmp_path: Path) -> None:
    model = llama(num_hidden_layers=4)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if stored == "shards" else "1GB")
    if stored == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / stored)
        (tmp_path / "model.safetensors").unlink()
    changed(tmp_path, {"num_hidden_layers": 2})
    with pytest.raises(UserError, match=r"does not read 18 tensors of "):
        load_checkpoint(tmp_path)


def old_gpt2(folder: Path, prefix: str) -> Path:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **BOS_AND_EOS))
    model.save_pretrained(folder)
    held = {
        prefix + name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    mask = torch.ones(1, 1, 64, 64).tril()
    masks = {f"{prefix}h.{n}.attn.bias": mask.clone() for n in range(2)}
    fills = {f"{prefix}h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    save_file(held | masks | fills, folder / "model.safetensors", {"format": "pt"})
    return folder


def gptj() -> transformers.GPTJForCausalLM:
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPT2, **BOS_AND_EOS, rotary_dim=4))


def gpt_neox() -> transformers.GPTNeoXForCausalLM:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **BOS_AND_EOS))


def gemma3_of_images() -> transformers.Gemma3ForConditionalGeneration:
    text = SIZES | {"head_dim": 8, "sliding_window": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def bert() -> transformers.BertForPreTraining:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return transformers.BertForPreTraining(transformers.BertConfig(**sizes, is_decoder=True))


def classifier(kind: Any) -> Any:
    return kind(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=0))


def with_masks(mask: Tensor) -> dict[str, Tensor]:
    return {"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e9)}


NEOX = {"attention.bias": torch.ones(1, 1, 8, 8).tril(), "attention.masked_bias": torch.tensor(-1e9)}
NEOX |= {"attention.rotary_emb.inv_freq": torch.ones(4)}
INV_FREQ = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
TAKEN: dict[str, tuple[Callable[[Path], Path], int]] = {
    "Llama": (lambda folder: saved(folder, llama()), 0),
    "Qwen2": (lambda folder: saved(folder, qwen2()), 0),
    "experts": (lambda folder: saved(folder, deepseek()), 0),
    "text and images": (lambda folder: saved(folder, gemma3_of_images()), 0),
    "fp8": (lambda folder: in_8_bits(folder, quantised=True), 0),
    "a head equal to the embedding": (
        lambda folder: saved(folder, llama(tie_word_embeddings=True), tensors={"lm_head.weight": torch.ones(64, 32)}),
        0,
    ),
    "rotary buffers": (lambda folder: saved(folder, llama(), tensors=INV_FREQ), 1),
    "masks of GPT-2": (lambda folder: old_gpt2(folder, "transformer."), 4),
    "masks of GPT-2's body": (lambda folder: old_gpt2(folder, ""), 4),
    "masks of GPT-J": (
        lambda folder: saved(folder, gptj(), tensors=with_masks(torch.ones(1, 1, 64, 64, dtype=torch.bool).tril())),
        2,
    ),
    "buffers of GPT-NeoX": (
        lambda folder: saved(
            folder, gpt_neox(), tensors={f"gpt_neox.layers.0.{name}": tensor for name, tensor in NEOX.items()}
        ),
        3,
    ),
    "multi-token prediction where the class names the layer": (
        lambda folder: saved(folder, deepseek(), tensors=of_token_prediction(61)),
        9,
    ),
    "multi-token prediction behind the layers": (
        lambda folder: saved(folder, deepseek(), tensors=of_token_prediction(2)),
        9,
    ),
    "a head of classes": (lambda folder: saved(folder, classifier(transformers.LlamaForSequenceClassification)), 1),
    "a head of tokens": (
        lambda folder: saved(folder, classifier(transformers.LlamaForTokenClassification)),
        2,
    ),
    "a head of choices": (
        lambda folder: saved(folder, transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(**GPT2, **BOS_AND_EOS))),
        2,
    ),
    "heads of BERT's training": (lambda folder: saved(folder, bert()), 4),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_transformers_declares_is_left_unread_and_told(kind: str, tmp_path: Path) -> None:
    make, count = TAKEN[kind]
    folder = make(tmp_path)
    # transformers 5.16 fails on every model with weights in fp8
    if kind == "fp8" and Version(transformers.__version__).release < OLDEST_TRANSFORMERS_OF_FP8:
        with pytest.raises(UserError, match=r"fp8 needs transformers 5\.17 or newer, and 5\.16"):
            load_checkpoint(folder)
        return
    loaded = load_checkpoint(folder)
    assert (len(loaded.unread.declared), loaded.unread.allowed) == (count, ())
    described = describe(tmp_path)
    assert (described.format, described.unread) == (loaded.format, loaded.unread)


def test_keys_without_a_value_beside_the_parameters_of_each_kind_of_layer_say_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path, gemma3_of_images())
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text["rope_parameters"] |= {"rope_theta": None, "rope_type": "default"}  # as transformers 5.16 saves them
    changed(folder, {"text_config": text})
    rope = load_checkpoint(folder).model.config.get_text_config().rope_parameters
    assert rope["full_attention"]["rope_theta"] == 1e6
    changed(folder, {"text_config": text | {"rope_parameters": {"rope_theta": None}}})
    with pytest.raises(UserError, match="rope_theta of the RoPE parameters must be of type float, got None"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8),  # what a distance adds
        torch.tensor(0.5),  # a scale
        torch.tensor([3, 1, 2, 0]),  # a table
        torch.full((4,), -1e4),
    ],
    ids=["bias of pairs", "scale", "table", "many"],
)
def test_a_tensor_of_learned_numbers_is_no_mask(tensor: Tensor, tmp_path: Path) -> None:
    folder = saved(tmp_path, llama(), tensors={"model.layers.0.self_attn.other": tensor})
    with pytest.raises(UserError, match=r"does not read 1 tensor of .* \(model.layers.0.self_attn.other\)"):
        load_checkpoint(folder)


def test_patterns_allow_the_names_they_match_and_no_others(tmp_path: Path) -> None:
    folder = saved(tmp_path, llama(num_hidden_layers=3, attention_bias=True), config={"num_hidden_layers": 2})
    changed(folder, {"attention_bias": False})
    with pytest.raises(UserError, match=r"does not read 8 tensors of .* \(model.layers.0-1"):
        load_checkpoint(folder, allow_unread=("model.layers.2.*",))
    loaded = load_checkpoint(folder, allow_unread=("model.layers.2.*", "*.bias"))
    assert len(loaded.unread.allowed) == 21
    answer = inspect(
        str(folder), check=lambda *_: True, share=lambda *_: None, model_args={"allow_unread": "*.layers.*"}
    )
    text = answer.to_text()
    assert "left unread       21 tensors, allowed by allow_unread: model.layers.0-2.self_attn.k_proj.bias" in text
    assert answer.to_json()["checkpoint"]["unread"] == loaded.unread.to_json()


@given(st.dictionaries(st.integers(0, 30), st.sets(st.sampled_from(["q.weight", "k.bias"]), min_size=1), max_size=8))
def test_folded_names_stand_for_exactly_the_layers_that_hold_them(layers: dict[int, set[str]]) -> None:
    lines = folded(f"model.layers.{layer}.{name}" for layer, names in layers.items() for name in names)
    unfolded = set()
    for line in lines:
        _, _, numbers, name = line.split(".", 3)
        for run in numbers.split(","):
            first, _, last = run.partition("-")
            unfolded |= {(layer, name) for layer in range(int(first), int(last or first) + 1)}
    assert unfolded == {(layer, name) for layer, names in layers.items() for name in names}
    assert len(lines) <= 2


def test_the_tensors_of_a_model_and_its_adapter_add_up() -> None:
    both = UnreadTensors(allowed=("b",)) | UnreadTensors(allowed=("a",), declared=("c",))
    assert both == UnreadTensors(allowed=("a", "b"), declared=("c",))
    assert (bool(both), UnreadTensors().to_json(), UnreadTensors().sentence()) == (True, None, None)


def test_an_extension_refuses_them_unless_they_are_allowed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "parent", llama(num_hidden_layers=3), config={"num_hidden_layers": 2})
    (text := tmp_path / "text.txt").write_text("nothing")
    options = ["--data", str(text), "--context", "128", "--out", str(tmp_path / "out")]
    options += ["--steps", "1", "--batch-tokens", "128"]
    with pytest.raises(UserError, match="does not read 9 tensors of "):
        extend_command([str(folder), *options])
    with pytest.raises(UserError, match="tokenizer"):  # it goes on to what is not there
        extend_command([str(folder), *options, "--allow-unread", "model.layers.*"])
