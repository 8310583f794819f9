import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from sbeval.checkpoints.facts import training_length_tokens
from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.load import load_checkpoint, released_format
from sbeval.checkpoints.registry import FORMATS
from sbeval.checkpoints.unread import UnreadTensors
from sbeval.errors import UserError
from sbeval.inspection.description import describe
from sbeval.models import SbevalConfig, SbevalForCausalLM
from tests.checkpoints.layouts import VOCAB, dolomite, fla, save, tokens
from tests.checkpoints.test_forgetting import forgetting_logits

SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}


def llama(folder: Path, **fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **fields)).eval()
    model.save_pretrained(folder)
    return model


def own(folder: Path, **fields: Any) -> SbevalForCausalLM:
    torch.manual_seed(0)
    model = SbevalForCausalLM(SbevalConfig(**SIZES, training_length_tokens=40, **fields)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize(("kv_heads", "tied"), [(None, False), (2, True)])
def test_fla_checkpoints_give_their_layouts_logits_and_remember_where_their_tokenizer_is(
    qkv_bias: bool, qk_norm: bool, attend_current: bool, kv_heads: int | None, tied: bool, tmp_path: Path
) -> None:
    said = {"qkv_bias": qkv_bias, "qk_norm": qk_norm, "attend_current": attend_current}
    config, tensors = fla(**said, kv_heads=kv_heads, tied=tied)
    loaded = load_checkpoint(save(tmp_path, config, tensors))
    assert (loaded.format, loaded.training_length_tokens) == ("fla:stickbreaking_attn", None)
    assert loaded.model.name_or_path == loaded.model.config.name_or_path == str(tmp_path)
    with torch.no_grad():
        assert_close(loaded.model(tokens()).logits[0], forgetting_logits(config, tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["dolomite", "fla"])
def test_a_head_that_is_not_the_embedding_of_a_tied_model_is_refused(layout: str, tmp_path: Path) -> None:
    made = {
        "dolomite": lambda: dolomite(tied=True),
        "fla": lambda: fla(qkv_bias=False, qk_norm=False, kv_heads=2, tied=True),
    }
    config, tensors = made[layout]()
    embedding = next(tensor for name, tensor in tensors.items() if "wte" in name or "embeddings" in name)
    load_checkpoint(save(tmp_path, config, {**tensors, "lm_head.weight": embedding.clone()}))
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embedding"):
        load_checkpoint(save(tmp_path, config, {**tensors, "lm_head.weight": embedding + 1}))


def test_own_checkpoints_keep_their_facts(tmp_path: Path) -> None:
    parent = {"name": "parent", "sha256": "ab", "training_length_tokens": 20}
    model = own(tmp_path, extended_from=parent, attention="alibi")
    loaded = load_checkpoint(tmp_path, dtype="bfloat16")
    assert (loaded.format, loaded.attention, loaded.training_length_tokens) == ("sbeval", "alibi", 40)
    assert (loaded.extended_from, loaded.model.dtype) == (parent, torch.bfloat16)
    assert not loaded.model.training
    with torch.no_grad():
        assert_equal_but_for_rounding(load_checkpoint(tmp_path).model(tokens()).logits, model(tokens()).logits)


def test_hugging_face_models_load_as_they_are(tmp_path: Path) -> None:
    model = llama(tmp_path, max_position_embeddings=96)
    loaded = load_checkpoint(str(tmp_path))
    assert (loaded.format, loaded.attention, loaded.training_length_tokens) == ("huggingface:llama", "llama", 96)
    with torch.no_grad():
        assert_equal_but_for_rounding(loaded.model(tokens()).logits, model(tokens()).logits)


def test_what_is_no_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found nothing"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    for config, words in (("{", "not JSON"), ('{"model_type": "stickbreaking"}', r"model\.safetensors")):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(UserError, match=words):
            load_checkpoint(tmp_path)
    config, tensors = dolomite()
    with pytest.raises(UserError, match="dtype"):
        load_checkpoint(save(tmp_path, config, tensors), dtype="float99")
    with pytest.raises(UserError, match="transformers cannot load"):
        load_checkpoint(save(tmp_path, {**config, "model_type": "banana"}, tensors))


@pytest.mark.every_combination
@pytest.mark.parametrize("kind", ["dolomite", "own", "llama"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing shard", "names 2 shards, of which 1 are missing in .*: model-00002"),
        ("truncated", "truncated"),
        ("lacks a tensor", "lacks tensors that its index names: another.weight"),
        (
            "shape",
            r"should have the shape \[56, 32\]",
        ),
        ("no index", "an index of shards as a JSON object at .*model.safetensors.index.json"),
        ("a tensor missing", r"\.1\.mlp\.(down_proj|c_proj)"),
    ],
)
def test_damaged_weights_are_found_before_anything_runs_and_missing_ones_never_left_random(
    kind: str, damage: str, words: str, tmp_path: Path
) -> None:
    if kind == "dolomite":
        save(tmp_path, *dolomite())
    else:
        (own if kind == "own" else llama)(tmp_path)
    whole, shard = tmp_path / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors"
    whole.rename(shard)
    index = {"transformer.wte.weight" if kind == "dolomite" else "model.embed_tokens.weight": shard.name}
    if damage == "missing shard":
        index["model.norm.weight"] = "model-00002-of-00002.safetensors"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    if damage == "lacks a tensor":
        index["another.weight"] = shard.name
    if damage == "a tensor missing":
        tensors = load_file(shard)
        save_file({name: tensors[name] for name in tensors if not re.search(words, name)}, shard, {"format": "pt"})
    if damage == "shape":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB + 3}))
    content = [] if damage == "no index" else {"metadata": {}, "weight_map": index}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=words):
        load_checkpoint(tmp_path)


def test_pickled_weights_load_without_running_code(tmp_path: Path) -> None:
    config, tensors = dolomite()
    expected = load_checkpoint(save(tmp_path / "safe", config, tensors))
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    loaded = load_checkpoint(tmp_path)
    with torch.no_grad():
        assert_equal_but_for_rounding(loaded.model(tokens()).logits, expected.model(tokens()).logits)

    class Dangerous:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({**tensors, "extra": Dangerous()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="truncated or damaged"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        *((name, "stickbreaking") for name in ("stickbreaking", "gpt_base")),
        *((name, "stickbreaking_attn") for name in ("stickbreaking_attn", "forgetting_transformer-project_fox")),
        *((name, "stickbreaking_attn") for name in ("transformer-project_fox", "forgetting_transformer")),
        *(("moduleformer", "moduleformer"), ("sbeval", None), ("llama", None)),
    ],
)
def test_formats_are_told_by_the_configuration_alone(model_type: str, expected: str | None, tmp_path: Path) -> None:
    assert released_format(tmp_path) == (None, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    known, config = released_format(tmp_path)
    assert (known.model_types[0] if known else None, config) == (expected, {"model_type": model_type})
    assert released_format(tmp_path / "nothing") == (None, {})


def test_no_two_formats_claim_a_model_type() -> None:
    types = [model_type for known in FORMATS for model_type in known.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize("make", [own, llama, lambda folder: save(folder, *dolomite())])
def test_weights_lie_where_products_of_matrices_want_them_wherever_the_file_has_them(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "model.safetensors"
    places = set()
    for note in ("", "a longer header"):
        save_file(load_file(path), path, metadata={"format": "pt", "note": note})
        with safe_open(path, framework="pt") as file:
            places |= {file.get_tensor(name).data_ptr() % 64 for name in file.keys()}  # noqa: SIM118  (no mapping)
        assert {weight.data_ptr() % 64 for weight in load_checkpoint(tmp_path).model.parameters()} == {0}
    assert places != {0}, "the files had their tensors there already"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "sbeval", "training_length_tokens": 40, "max_position_embeddings": 96}, 40),
        ({"model_type": "sbeval", "training_length_tokens": None, "max_position_embeddings": 96}, None),
        ({"max_position_embeddings": 96}, 96),
        ({"n_positions": 96}, 96),
        ({"rope_parameters": YARN, "max_position_embeddings": 96}, 24),
        ({"rope_parameters": {"full_attention": YARN}, "max_position_embeddings": 96}, 24),
        ({"original_max_position_embeddings": 24, "max_position_embeddings": 96}, 24),
        ({"rope_parameters": YARN, "max_position_embeddings": 96, "extended_from": {"name": "parent"}}, 96),
        ({"text_config": SimpleNamespace(max_position_embeddings=96)}, 96),
        ({"max_position_embeddings": -1}, None),
        ({}, None),
    ],
)
def test_the_training_length_is_the_one_before_any_scaling_that_was_not_trained(
    config: dict[str, Any], length: int | None
) -> None:
    assert training_length_tokens(SimpleNamespace(**config)) == length


def beside(folder: Path, name: str, tensors: Iterable[str]) -> None:
    """Saves another file of weights beside a checkpoint's own."""
    held = {tensor: torch.zeros(2) for tensor in tensors}
    if name.endswith(".bin"):
        torch.save(held, folder / name)
    else:
        save_file(held, folder / name)


@pytest.mark.parametrize(("make", "stored"), [(llama, "safetensors"), (llama, "bin"), (own, "safetensors")])
def test_a_shard_that_no_index_names_is_refused_allowed_or_named_in_the_log_of_rank_0(
    make: Callable[[Path], Any],
    stored: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path)
    held = list(load_file(tmp_path / "model.safetensors"))
    name, source = "model-00002-of-00002.safetensors", "model.safetensors"
    if stored == "bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
        name, source = "pytorch_model-00002-of-00002.bin", "pytorch_model.bin"
    beside(tmp_path, name, [*held, "model.layers.9.mlp.up_proj.weight"])
    unread = "model.layers.9.mlp.up_proj.weight"
    sentence = rf"loaded from {source} does not read 1 tensor of .*{name} \({unread}\), .* correct the index"
    with pytest.raises(UserError, match=sentence) as refused:
        load_checkpoint(tmp_path, allow_unread=("*.bias",))
    described = describe(tmp_path)
    assert (described.problems[0], described.tensors) == (str(refused.value), len(held))
    assert "allow_unread=model.layers.*.mlp.up_proj.weight" in str(refused.value)
    with pytest.raises(UserError, match=r"another folder\.$"):  # where there is no such option
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path, allow_unread=("*.up_proj.*",)).unread == UnreadTensors(allowed=(unread,))
    assert describe(tmp_path, allow_unread=("*.up_proj.*",)).unread == UnreadTensors(allowed=(unread,))
    caplog.clear()
    beside(tmp_path, name, held)  # of an older copy
    load_checkpoint(tmp_path)
    assert [record.getMessage() for record in caplog.records if name in record.getMessage()]
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    load_checkpoint(tmp_path)
    assert not caplog.records
    (tmp_path / name).write_bytes(b"no weights")
    load_checkpoint(tmp_path)


def test_the_shards_are_read_that_transformers_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama(tmp_path / "both")
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    for file in (tmp_path / "shards").iterdir():
        shutil.copy(file, tmp_path / "both")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path / "one")
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "both")
    loaded = load_checkpoint(tmp_path / "both").model
    read = Weights(tmp_path / "both").read("lm_head.weight")
    assert torch.equal(loaded.lm_head.weight, read)
    assert "model-00001-of-0000" in caplog.text
    caplog.clear()
    load_checkpoint(tmp_path / "shards")
    assert "not read" not in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        *("adapter_model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"),
        *("model.fp16.safetensors", "model-00001-of-00002.fp16.safetensors", "model.fp16-00001-of-00002.safetensors"),
        *("pytorch_model.bin", "training_args.bin"),
    ],
)
def test_files_of_weights_with_another_use_need_no_word(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama(tmp_path)
    beside(tmp_path, name, ["model.layers.9.mlp.up_proj.weight"])
    load_checkpoint(tmp_path)
    assert "not read" not in caplog.text
