"""A checkpoint is described as loading finds it, from headers alone; what loading refuses is refused in its words."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PretrainedConfig,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from sbeval.checkpoints import load_checkpoint
from sbeval.demo.evaluation import shipped_checkpoints
from sbeval.errors import UserError
from sbeval.inspection.command import inspect
from sbeval.inspection.description import Description, _details, describe
from sbeval.inspection.memory import _integer
from sbeval.models import SbevalForCausalLM, preset
from tests.checkpoints.layouts import dolomite, fla, save
from tests.checkpoints.test_moduleformer import checkpoint as moduleformer
from tests.marks import exhaustive
from tests.models.small import VARIANTS, small_model

HEADS: dict[str, Any] = {"head_bias": True, "head_norm": True}
LAYOUTS: dict[str, Any] = {
    "dolomite:A1": lambda: dolomite(),
    "dolomite:A3, grouped": lambda: dolomite(head_bias=True, kv_heads=2),
    "dolomite:A4, one key head": lambda: dolomite(**HEADS, kv_heads=1),
    "dolomite:C": lambda: dolomite(**HEADS, model_type="gpt_dolomite", tied=False),
    "dolomite:C''": lambda: dolomite(**HEADS, model_type="gpt_base", kv_heads=2),
    "dolomite:softmax": lambda: dolomite(model_type="gpt_dolomite", mixer="softmax", kv_heads=2),
    "fla:stickbreaking_attn": lambda: fla(qkv_bias=True, qk_norm=True, kv_heads=2, tied=False),
    "moduleformer": lambda: moduleformer("mlp"),
}


def check_as_loaded(folder: Path) -> Description:
    found, loaded = describe(folder), load_checkpoint(folder)
    assert (found.format, found.attention) == (loaded.format, loaded.attention)
    assert found.training_length_tokens == loaded.training_length_tokens
    assert found.sizes.parameters == sum(parameter.numel() for parameter in loaded.model.parameters())
    assert found.sizes.weight_bytes == sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert found.dtype == str(loaded.model.dtype).removeprefix("torch.")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_released_format_is_described_as_it_loads(layout: str, tmp_path: Path) -> None:
    assert check_as_loaded(save(tmp_path, *LAYOUTS[layout]())).format == layout.partition(",")[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_of_the_family_is_described_as_it_loads(variant: str, tmp_path: Path) -> None:
    small_model(**VARIANTS[variant]).save_pretrained(tmp_path)
    assert check_as_loaded(tmp_path).training_length_from == "training_length_tokens in config.json"


def test_a_model_of_transformers_is_described_as_it_loads(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 48}
    sizes = {"vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=192, rope_parameters=rope
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = check_as_loaded(tmp_path)
    assert found.format == "huggingface:llama"
    assert found.training_length_tokens == 48
    assert found.training_length_from == "original_max_position_embeddings of rope_parameters in config.json"
    assert found.rope["factor"] == 4.0
    assert found.learned_positions is None


def test_learned_positions_are_named_and_end_what_fits(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=70, n_positions=40, n_embd=32, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    found = check_as_loaded(tmp_path)
    assert found.learned_positions == 40
    assert found.training_length_from in ("max_position_embeddings in config.json", "n_positions in config.json")
    room = inspect(str(tmp_path), memory="80GiB", check=lambda _: False, share=list).room
    assert room.longest_window_tokens == room.longest_text_tokens == 40


def test_the_tokenizer_is_described_and_compared_with_the_embeddings(tmp_path: Path) -> None:
    folder = shipped_checkpoints()[0]
    found = describe(folder)
    assert found.tokenizer.tokens == 4096
    assert found.problems == ()
    small_model().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert any("has ids up to" in problem and "61 embeddings" in problem for problem in describe(tmp_path).problems)


def test_a_tokenizer_that_is_not_there_is_told_as_missing_files(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    (problem,) = describe(tmp_path).problems
    assert "holds no tokenizer files, such as tokenizer.json" in problem
    (tmp_path / "tokenizer.json").write_text("{")
    (problem,) = describe(tmp_path).problems
    assert "does not load" in problem


def test_generations_of_dolomite_are_told_by_what_is_there(tmp_path: Path) -> None:
    told = describe(save(tmp_path, *dolomite(head_bias=True, kv_heads=2))).evidence
    assert told[0] == "model_type 'stickbreaking' in config.json"
    assert "tensors attn.head_bias" in told
    assert "no tensors attn.norm.weight" in told


def sparse_checkpoint(folder: Path, config: Any) -> int:
    """Writes a checkpoint whose weights are a hole in a file, and returns the size of the file."""
    with torch.device("meta"):
        model = SbevalForCausalLM(config)
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    written = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    return 8 + len(written) + end


@pytest.mark.parametrize("name", ["moe-6.5b", *exhaustive("3b")])
def test_gigabytes_of_weights_are_described_without_being_read(name: str, tmp_path: Path) -> None:
    describe(shipped_checkpoints()[0])  # what imports take
    size = sparse_checkpoint(tmp_path, preset(name))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = describe(tmp_path)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert 0.99 * size < found.sizes.weight_bytes < size
    assert grown < size / 20
    assert bool(found.sizes.idle_parameters) == (name != "3b")


@pytest.mark.parametrize("kind", ["dolomite", "sbeval", "llama"])
@pytest.mark.parametrize("change", ["missing", "another shape"])
def test_what_loading_refuses_is_said_in_its_words(kind: str, change: str, tmp_path: Path) -> None:
    if kind == "dolomite":
        config, tensors = dolomite(**HEADS)
        save(tmp_path, config, tensors)
    elif kind == "sbeval":
        tensors = dict(small_model().state_dict())
        small_model().save_pretrained(tmp_path)
    else:
        sizes = {"vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
        tensors = dict(model.state_dict())
        model.save_pretrained(tmp_path)
    name = next(name for name in tensors if "norm" in name or "ln_1" in name)
    kept = tensors.pop(name)
    if change == "another shape":
        tensors[name] = torch.zeros(len(kept) + 1)
    held = {key: value.contiguous() for key, value in tensors.items()}
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError) as refused:
        load_checkpoint(tmp_path)
    found = describe(tmp_path)
    assert found.format is None
    assert found.sizes is None
    assert str(refused.value) == found.problems[0]
    assert name in found.problems[0]


@pytest.mark.parametrize("positions", [None, "rope"])
def test_rotary_parameters_are_told_of_models_that_rotate(positions: str | None, tmp_path: Path) -> None:
    """Granite's hybrids have them whether their layers use them or not."""
    config = GraniteMoeHybridConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 0, "mamba_n_heads": 4},
        layer_types=["attention"],
        position_embedding_type=positions,
    )
    GraniteMoeHybridForCausalLM(config).save_pretrained(tmp_path)
    described = describe(tmp_path)
    assert (described.rope is None) == (positions is None)
    assert described.details.get("positions") == (None if positions else "no rotation")


def test_layers_without_positions_are_counted(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
    config = SmolLM3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, no_rope_layers=[1, 1, 0, 1])
    SmolLM3ForCausalLM(config).save_pretrained(tmp_path)
    assert describe(tmp_path).details["layers that rotate"] == "3 of 4"


def test_keys_that_a_model_does_not_know_decide_nothing(tmp_path: Path) -> None:
    sizes = {"vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    stray = {"no_rope_layers": 4, "position_embedding_type": None}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **stray)).save_pretrained(tmp_path)
    described = describe(tmp_path)
    assert described.rope is not None
    assert not {"positions", "layers that rotate"} & described.details.keys()


def test_layers_of_the_rarer_kinds_are_named_and_a_model_that_rotates_nothing(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 8}
    kinds = ["mamba", "attention", "mamba", "mlp", "mamba", "attention", "attention"]
    config = NemotronHConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, layers_block_type=kinds)
    NemotronHForCausalLM(config).save_pretrained(tmp_path)
    details = describe(tmp_path).details
    assert details["layers"] == {"linear_attention": "3", "full_attention": "3 (1, 5-6)", "mlp": "1 (3)"}
    assert details["positions"] == "no rotation"


class PerLayer(PretrainedConfig):  # type: ignore[misc]
    """Refuses to tell a size that differs from layer to layer, as Gemma 4's."""

    @property
    def head_dim(self) -> int:
        raise ValueError("differs from layer to layer")


def test_a_size_that_differs_from_layer_to_layer_is_none_of_the_model() -> None:
    assert _integer(PerLayer(), "head_dim") is None


@pytest.mark.parametrize(("name", "told"), [("rel_proj", "learned"), ("rotary_free", "no rotation")])
def test_relative_positions_that_are_learned_are_positions(name: str, told: str) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
    assert _details(SimpleNamespace(layer_types=["full_attention"]), model)["positions"] == told


def test_nobody_is_asked_to_run_a_checkpoints_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **own}))
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asks"))
    monkeypatch.setattr("signal.alarm", lambda _: pytest.fail("asks"))
    (problem, *_) = describe(tmp_path).problems
    assert (
        "needs code of its own (auto_map): read that code; if you trust it, evaluate with trust_remote_code=True"
        in problem
    )
