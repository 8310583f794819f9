"""A mistake of the user gives an error of one sentence: what is wrong, and what to do."""

import importlib.util
import json
import logging
import re
import resource
import shutil
import threading
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from safetensors.torch import load_file, save_file

from sbeval.checkpoints import load_checkpoint
from sbeval.checkpoints.files import Weights, weight_file_bytes
from sbeval.errors import UserError
from sbeval.inspection.description import describe
from sbeval.model_adapters.chat_templates import limited
from sbeval.model_adapters.open.arguments import check_early, check_shared_arguments
from sbeval.model_adapters.open.errors import explaining_load_errors
from sbeval.model_adapters.options import AdapterOptions
from sbeval.sweep.definition import check_checkpoint
from sbeval.tasks.tokens import TokenCounter, model_tokenizer
from tests.model_adapters.small import copied, instances, likelihoods, load_lm, save_lora, t5


def prompts(task: str, *texts: str, **setting: Any) -> list[Instance]:
    asked = {"until": ["\n"], "max_gen_toks": 8, **setting}
    return instances("generate_until", [(text, asked) for text in texts], task)


@pytest.mark.parametrize(
    ("name", "message"), [("nothing", "no such folder: {}: correct the path\\.$"), (".", "the folder {}")]
)
def test_a_folder_that_is_none_or_holds_no_checkpoint_is_named(name, message, tmp_path):
    with pytest.raises(UserError, match=message.format(tmp_path / name)):
        load_lm(tmp_path / name)


class Dangerous:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("damage", ["a missing shard", "a pickle with code", "a truncated pickle"])
@pytest.mark.parametrize("architecture", ["llama", "rope"])
def test_damaged_weights_are_one_error_before_any_evaluation_and_run_no_code(
    architecture, damage, checkpoint, tmp_path
):
    folder = shutil.copytree(checkpoint(architecture), tmp_path / "copy")
    tensors, pickled = load_file(folder / "model.safetensors"), folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    if damage == "a missing shard":
        index = {"weight_map": dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        torch.save({**tensors, "extra": Dangerous(tmp_path / "ran")} if "code" in damage else tensors, pickled)
    if damage == "a truncated pickle":
        pickled.write_bytes(pickled.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"names 1 shards, of which 1 are missing|Expected a model's weights"):
        load_lm(folder)
    assert not (tmp_path / "ran").exists()


CODE_OF_ITS_OWN = """
import transformers
class Config(transformers.LlamaConfig):
    model_type = "{}"
class Model(transformers.LlamaForCausalLM):
    config_class = Config
"""


def test_code_that_a_checkpoint_brings_along_runs_only_when_trusted(checkpoint, tmp_path):
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    folder = copied(checkpoint("llama"), tmp_path, model_type="homemade", auto_map=auto_map)
    (folder / "own.py").write_text(CODE_OF_ITS_OWN.format("homemade"))
    with pytest.raises(UserError, match="it runs code of its own: read that code, and pass trust_remote_code=True if"):
        load_lm(folder)
    assert type(load_lm(folder, trust_remote_code=True).model).__name__ == "Model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"quantization_config": {"quant_method": method}}, re.escape(f"quant_method={method!r}"))
            for method in ("compressed-tensors", "hqq", "quark", 7, ["gptq"], None)
        ),
        ({"quantization_config": {"quant_method": "torchao", "quant_type": "int4_weight_only"}}, "No module .*torchao"),
        ({"quantization_config": {"bits": 4}}, "quant_method=None"),
        ({"quantization_config": {}}, "quant_method=None"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok in .* at most 4, found 5"),
        ({"n_routed_experts": 4, "n_group": 10**9}, "n_group in config.json must be at most 4, found 1000000000"),
        ({"n_group": 2, "topk_group": 10**9}, "topk_group in config.json must be at most 2, found 1000000000"),
        ({"num_labels": 10**9}, "num_labels in .* must be at most 1048576, found 1000000000"),
        ({"num_attention_heads": "four"}, "num_attention_heads in .*, found 'four'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "rope"])
def test_what_a_run_cannot_load_is_not_recommended_by_inspect(architecture, change, message, checkpoint, tmp_path):
    method = str(change.get("quantization_config", {}).get("quant_method")).replace("-", "_")
    if importlib.util.find_spec(method):
        pytest.skip("its package is here")
    folder = copied(checkpoint(architecture), tmp_path, **change)
    for load in (load_lm, load_checkpoint, lambda folder: pytest.fail(str(describe(folder).problems[0]))):
        with pytest.raises((UserError, pytest.fail.Exception), match=message):
            load(folder)


@pytest.mark.parametrize("load", [load_lm, load_checkpoint])
def test_weights_in_fp8_are_refused_with_a_transformers_that_cannot_load_them(load, checkpoint, tmp_path, monkeypatch):
    folder = copied(checkpoint("llama"), tmp_path, quantization_config={"quant_method": "fp8"})
    monkeypatch.setattr("sbeval.checkpoints.versions.transformers.__version__", "5.16.1")
    with pytest.raises(UserError, match=r"fp8 needs transformers 5\.17 or newer, and 5\.16\.1 is installed: upgrade"):
        load(folder)


def test_a_quantisation_among_the_arguments_is_refused_since_hf_takes_none(checkpoint):
    arguments = {"quantization_config": {"quant_method": "fp8"}}
    for refuse in (
        lambda: check_early({"pretrained": str(checkpoint("llama"))} | arguments),
        lambda: load_lm(checkpoint("llama"), **arguments),
    ):
        with pytest.raises(UserError, match=r"contains quantization_config, .* config\.json: write it there"):
            refuse()


@pytest.mark.parametrize(
    ("architecture", "change"),
    [("llama", {"model_type": "gemma3"}), ("qwen3", {"model_type": "qwen3_moe", "num_experts": 10**9})],
)
def test_what_no_file_could_hold_is_refused_before_it_takes_memory(architecture, change, checkpoint, tmp_path):
    folder = copied(checkpoint(architecture), tmp_path, **change)
    for load in (load_lm, load_checkpoint):
        with pytest.raises(UserError, match=f"of a {change['model_type']} model with [0-9,]{{10,}} parameters"):
            load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float8_e4m3fn])
def test_a_quantisation_that_nobody_knows_is_passed_over_where_weights_are_in_floating_point(
    dtype, checkpoint, tmp_path
):
    folder = copied(checkpoint("llama"), tmp_path, quantization_config={"quant_method": "exl2"})
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, file, {"format": "pt"})
    for load in (load_lm, load_checkpoint):
        with nullcontext() if dtype == torch.float32 else pytest.raises(UserError, match="quant_method='exl2'"):
            load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
@pytest.mark.parametrize("save", [save_file, torch.save])
@pytest.mark.parametrize("architecture", ["llama", "rope"])
def test_weights_that_are_whole_numbers_are_not_cast(architecture, save, dtype, checkpoint, tmp_path):
    folder = copied(checkpoint(architecture), tmp_path)
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(dtype)
    file.unlink()
    save(tensors, file if save is save_file else folder / "pytorch_model.bin")
    for load in (load_lm, load_checkpoint, describe):
        with pytest.raises(UserError, match=r"integers or booleans: model.layers.0.mlp.up_proj.weight;"):
            load(folder)


def test_masks_and_positions_may_be_whole_numbers(checkpoint, tmp_path):
    folder = copied(checkpoint("gpt2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    others = {"position_ids": torch.arange(128), "h.0.relative_attention_bias": torch.arange(8)}
    for shape in ((1, 1, 128, 128), (1, 128, 128), (128, 128)):
        masks = {f"h.0.{name}.bias": torch.ones(shape, dtype=torch.uint8) for name in ("attn", "attention")}
        save_file(tensors | others | masks, folder / "model.safetensors", {"format": "pt"})
        load_lm(folder)


def test_what_lies_beside_the_weights_of_a_checkpoint_is_not_counted(checkpoint, tmp_path):
    folder = copied(checkpoint("gpt2"), tmp_path)
    (folder / "pytorch_model.bin").symlink_to("nowhere")
    load_lm(folder)
    weights = Weights(folder)
    (folder / "model.safetensors").unlink()  # shapes are read once
    assert weights.shape(weights.names()[0])
    (folder / "model.safetensors").touch()
    save_file({"a": torch.ones(9)}, folder / "elsewhere.safetensors")
    (folder / "older").mkdir()
    (folder / "older" / "model.safetensors").write_bytes(bytes(99))
    assert weight_file_bytes(folder) == (folder / "elsewhere.safetensors").stat().st_size
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "older/model.safetensors"}}')
    assert weight_file_bytes(folder) == (folder / "elsewhere.safetensors").stat().st_size + 99


FLEX = {"attn_implementation": "flex_attention"}


@pytest.mark.parametrize(
    ("architecture", "change"),
    [("llama", FLEX), *((architecture, {"return_dict": False}) for architecture in ("llama", "gpt2", "rope", "t5"))],
)
def test_how_a_model_returns_and_computes_attention_changes_no_number_on_a_cpu(
    architecture, change, checkpoint, tmp_path
):
    whole = t5(tmp_path / "t5") if architecture == "t5" else checkpoint(architecture)
    lm, pair = load_lm(copied(whole, tmp_path, **change)), [("Beautiful is", " better")]
    assert likelihoods(lm, pair) == likelihoods(load_lm(whole), pair)
    assert lm.get_model_info()["sbeval"]["kernels"] == load_lm(whole).get_model_info()["sbeval"]["kernels"]


@pytest.mark.parametrize("instead", ["sdpa", "eager"])
def test_flex_attention_becomes_what_the_model_supports(instead, checkpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_sdpa", instead == "sdpa")
    assert load_lm(copied(checkpoint("llama"), tmp_path, **FLEX)).model.config._attn_implementation == instead
    assert f"{instead} is used" in caplog.text


def test_an_attention_that_a_model_lacks_is_no_fault_of_the_checkpoint(checkpoint, tmp_path):
    transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=400, hidden_size=8, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "bloom")
    words = "this attention implementation cannot be used .*: leave attn_implementation out of --model_args, or name"
    for folder, named in ((checkpoint("llama"), "nonsense"), (tmp_path / "bloom", "flash_attention_2")):
        with pytest.raises(UserError, match=words):
            load_lm(folder, attn_implementation=named, tokenizer=str(checkpoint("llama")))


@pytest.mark.parametrize("value", ["flash_attention_2", "nonsense"])
def test_an_attention_that_config_json_asks_for_is_replaced_as_its_sentence_says(value, checkpoint, tmp_path):
    folder = copied(checkpoint("llama"), tmp_path / "argument", attn_implementation=value)
    words = "pass attn_implementation=sdpa or eager in --model_args, which counts before that of config.json"
    with pytest.raises(UserError, match=words):
        load_lm(folder)
    load_lm(folder, attn_implementation="sdpa")
    folder = copied(checkpoint("llama"), tmp_path / "file", _attn_implementation=value)
    words = "take _attn_implementation out of config.json, which counts before attn_implementation in --model_args"
    for arguments in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises(UserError, match=words):
            load_lm(folder, **arguments)


def test_what_is_wrong_with_a_gguf_file_is_said_of_that_file(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    with pytest.raises(UserError, match=rf"there is no file {folder}/m.gguf: correct gguf_file"):
        load_lm(folder, gguf_file="m.gguf")
    (folder / "m.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(UserError) as refused:
        load_lm(folder, gguf_file="m.gguf")
    assert re.search(r"m.gguf does not hold a |a package is missing .*: install the package\.", str(refused.value))
    assert "save_pretrained" not in str(refused.value)


def test_an_adapter_in_a_models_place_is_told_to_be_one(checkpoint, tmp_path):
    folder = Path(save_lora(tmp_path / "lora", checkpoint("llama"), "q_proj"))
    words = rf"found a PEFT adapter: pass the model .*{checkpoint('llama')}.* and peft={folder}"
    early = lambda folder: check_early({"pretrained": str(folder)})  # noqa: E731
    planned = lambda folder: check_checkpoint({"model": "sb", "model_args": {"pretrained": folder}})  # noqa: E731
    for load in (load_lm, load_checkpoint, describe, early, planned):
        with pytest.raises(UserError, match=words):
            load(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for base in (None, 7, ""):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(UserError, match="pass the model that it was trained on as pretrained, and peft="):
            load_lm(folder)
    load_lm(checkpoint("llama"), peft=str(folder))


@pytest.mark.parametrize("change", [{"target_modules": ["no_such_layer"]}, {"r": "two"}, {"lora_alpha": [1]}])
def test_what_is_wrong_with_an_adapter_is_said_of_it_and_not_of_the_model(change, checkpoint, tmp_path):
    save_lora(tmp_path / "lora", checkpoint("llama"), "q_proj")
    adapter = copied(tmp_path / "lora", tmp_path / "other", "adapter_config.json", **change)
    with pytest.raises(UserError, match=rf"Expected a PEFT adapter for this model at peft={adapter}, but it cannot"):
        load_lm(checkpoint("llama"), peft=str(adapter))


def test_a_tokenizer_that_is_named_apart_is_named_in_its_sentence(checkpoint, tmp_path):
    (broken := tmp_path / "tokenizer").mkdir()
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=rf"Expected a tokenizer at tokenizer={broken}, but the folder"):
        load_lm(checkpoint("llama"), tokenizer=str(broken))
    shutil.copytree(checkpoint("llama"), folder := tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=rf"a tokenizer at pretrained={folder}, .*, or name another with tokenizer="):
        load_lm(folder)


def test_a_subfolder_that_is_not_there_is_named(checkpoint):
    with pytest.raises(UserError, match=rf"there is no folder {checkpoint('llama')}/step7: correct subfolder"):
        load_lm(checkpoint("llama"), subfolder="step7")


@pytest.mark.parametrize(
    ("given", "config", "remedy"),
    [
        ({"load_in_4bit": True}, {}, "install the package, or leave load_in_4bit out of --model_args."),
        ({}, {"quantization_config": {}}, "install the package, or take a checkpoint whose weights are not quantised."),
        ({}, {"text_config": {"quantization_config": {}}}, "or take a checkpoint whose weights are not quantised."),
        ({}, {}, "a package is missing (no module x): install the package."),
    ],
)
def test_a_missing_package_is_told_with_what_asks_for_it(given, config, remedy):
    with (
        pytest.raises(UserError) as refused,
        explaining_load_errors("a/b", "a model's weights", given=given, config=config),
    ):
        raise ImportError("no module x")
    assert str(refused.value).endswith(remedy)


@pytest.mark.parametrize("key", ["peft_type", "task_type"])
def test_an_adapter_of_an_unknown_kind_is_named(key, checkpoint, tmp_path):
    save_lora(tmp_path / "lora", checkpoint("llama"), "q_proj")
    adapter = copied(tmp_path / "lora", tmp_path / "other", "adapter_config.json", **{key: "NO_SUCH"})
    with pytest.raises(UserError, match=rf"{key} of the adapter at peft=\S+ to be one of .*, found 'NO_SUCH': correct"):
        load_lm(checkpoint("llama"), peft=str(adapter))


def test_an_adapter_of_more_ranks_than_its_file_has_rows_is_refused(checkpoint, tmp_path):
    save_lora(tmp_path / "lora", checkpoint("llama"), "q_proj")
    refused = [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}]
    for place, change in enumerate([*refused, {"rank_pattern": {"no_layer": 64}}, {"alpha_pattern": {}}]):
        adapter = copied(tmp_path / "lora", tmp_path / str(place), "adapter_config.json", **change)
        words = "found a rank of 1000000000, and matrices of at most 32 rows"
        with pytest.raises(UserError, match=words) if change in refused else nullcontext():
            load_lm(checkpoint("llama"), peft=str(adapter))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "found none: leave out --apply_chat_template, as for any model that was not trained on chats"),
        ("{% for %}", "one that fails"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ raise_exception('no chat') }}", r"one that fails \(no chat\)"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        ("{{ 'x' * 2**26 }}", "writes more than 33554432 bytes"),
        ({"other": "{{ messages }}"}, "trained on chats, name one of its templates, or correct"),
        (7, "one that fails"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_a_missing_or_broken_chat_template_is_one_sentence(template, message, checkpoint):
    lm = load_lm(checkpoint("llama"))
    lm.tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    if template in (7, "\ud800", {"other": "{{ messages }}"}):  # lm-eval's record of the run asks for the template
        with pytest.raises(UserError, match="Expected a chat template"):
            lm.chat_template(True)
    lm.tokenizer.chat_template = "{{ messages[0].content }}!"
    assert lm.apply_chat_template([{"role": "user", "content": "a"}]) == "a!"


def test_threads_that_write_with_a_chat_template_leave_no_limit_of_memory():
    before, inside, left = resource.getrlimit(resource.RLIMIT_AS), threading.Event(), threading.Event()

    def write(lm: None, first: bool) -> str:
        if first:
            second.start()
        else:
            inside.set()
        (inside if first else left).wait(0.2)  # no speed-up, since the threads take turns
        return ""

    second = threading.Thread(target=limited(write), args=(None, False))
    limited(write)(None, True)
    left.set()
    second.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_tokenizer_that_panics_as_it_encodes_is_one_sentence(checkpoint, tmp_path):
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    lm, text = load_lm(copied(checkpoint("llama"), tmp_path, "tokenizer.json", pre_tokenizer=split)), "a" * 40 + "b"
    counter = TokenCounter(lm.tokenizer)
    for encode in (lm.tok_encode, counter.encode_with_offsets, lambda text: counter.count([text])):
        with pytest.raises(UserError, match=r"library crashed while encoding text .*retry-limit-in-match over"):
            encode(text)
    with pytest.raises(UserError, match="library crashed while encoding text"):
        likelihoods(lm, [(text, "a")])


@pytest.mark.skipif(find_spec("fla") is not None, reason="the package itself is there, which knows no such tiny model")
def test_models_of_fla_are_baselines_where_that_package_is_installed_which_is_named_where_not(
    checkpoint, tmp_path, monkeypatch
):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("")
    register = """transformers.AutoConfig.register("gated_deltanet", Config)
transformers.AutoModelForCausalLM.register(Config, Model)"""
    (tmp_path / "fla" / "models.py").write_text(CODE_OF_ITS_OWN.format("gated_deltanet") + register)
    folder = copied(checkpoint("llama"), tmp_path, model_type="gated_deltanet")
    with pytest.raises(UserError, match="install the package that defines it, flash-linear-attention for fla's models"):
        load_lm(folder)
    monkeypatch.syspath_prepend(tmp_path)
    lm = load_lm(folder)
    assert type(lm.model).__name__ == "Model"
    assert lm.get_model_info()["sbeval"]["format"] == "huggingface:gated_deltanet"


@pytest.mark.parametrize(("files", "lacks"), [("model.s*", "a model's weights"), ("tokenizer*", "a tokenizer")])
def test_what_a_checkpoint_lacks_is_named(files, lacks, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    for file in folder.glob(files):
        file.unlink()
    with pytest.raises(UserError, match=f"Expected {lacks} at pretrained="):
        load_lm(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint, tmp_path):
    model = json.loads((checkpoint("llama") / "tokenizer.json").read_text())["model"]
    model["vocab"]["xyz"] = 100_000
    with pytest.raises(UserError, match="the model's 302 embeddings, found ids up to 100000"):
        load_lm(copied(checkpoint("llama"), tmp_path, "tokenizer.json", model=model))


def test_added_tokens_without_an_embedding_are_a_warning(checkpoint, tmp_path, caplog):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    load_lm(folder)
    assert "the model has no embedding for these tokens of its tokenizer: <image>;" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "cuda"}, "kernels to be one of auto, triton, blockwise, reference, found 'cuda'"),
        ({"kv_expand": "repeat"}, "kv_expand to be one of auto, interleave, tile"),
        ({"truncation": "right"}, "truncation to be one of left, error"),
        ({"skip_threshold": 1.5}, "skip_threshold to be a number from 0 to below 1, found 1.5"),
        ({"training_length": -1}, "training_length to be a positive number of tokens, found -1"),
        ({"max_batch_tokens": "many"}, "max_batch_tokens to be a positive number of tokens, found 'many'"),
        ({"dtype": "float99"}, "dtype to be auto or a type such as bfloat16, found 'float99'"),
        ({"softmax_dtype": "float99"}, "softmax_dtype to be auto or a type such as bfloat16, found 'float99'"),
        ({"device": "cuda:99"}, "an existing device, such as cpu or cuda:0, found 'cuda:99' with"),
        ({"device": "gpu"}, "an existing device, such as cpu or cuda:0, found 'gpu' with"),
        ({"device": "npu"}, "an existing device, such as cpu or cuda:0, found 'npu' with"),
        ({"enable_thinking": True}, "enable_thinking=True needs think_end_token"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "betafast": 3}}, "got 'betafast'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": "x"}}, "rope_theta of rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling to be a scaling such as dynamic:4, or a JSON object, found"),
        ({"batch_size": "many"}, "batch_size to be a positive number or auto, found 'many'"),
        ({"batch_size": 0}, "batch_size to be a positive number or auto, found 0"),
        ({"max_length": 0}, "max_length to be a positive number of tokens, found 0"),
        ({"max_batch_size": 0}, "max_batch_size to be a whole number of at least 1, found 0"),
        ({"max_batch_size": "many"}, "max_batch_size to be a whole number of at least 1, found 'many'"),
        ({"peft": "/nowhere"}, "adapter_config.json at peft=/nowhere, found none"),
        ({"delta": "/nowhere"}, "config.json at delta=/nowhere, found none"),
        ({"max_lenght": 64}, "found max_lenght: correct it in --model_args"),
        ({"context_parallel": 1.5}, "context_parallel to be a whole number of processes from 1, found 1.5"),
        ({"context_parallel": 0}, "context_parallel to be a whole number of processes from 1, found 0"),
        (
            {"kernels": "blockwise"},
            r"for stick-breaking attention only, .* \(huggingface:llama\) has another: remove them",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named(options, message, checkpoint):
    with pytest.raises(UserError, match=message):
        load_lm(checkpoint("llama"), **options)


@pytest.mark.parametrize("truncation", ["left", True, False, None])
def test_long_prompts_are_cut_on_the_left_with_a_warning(truncation, checkpoint, caplog):
    lm = load_lm(checkpoint("llama"), truncation=truncation, max_length=64)
    text = "Beautiful is better than ugly. " * 20
    kept = lm.tok_decode(lm.tok_encode(text)[-56:])
    caplog.set_level(logging.WARNING)
    (long,) = lm.generate_until(prompts("hellaswag", text), disable_tqdm=True)
    assert "1 of 1 prompts were cut on the left by up to" in caplog.text
    (short,) = lm.generate_until(prompts("hellaswag", kept), disable_tqdm=True)
    assert long == short


def test_cut_tokens_are_recorded_with_the_sample(checkpoint):
    lm = load_lm(checkpoint("llama"), max_length=64)
    text = "Beautiful is better than ugly. " * 20
    short, long = requests = prompts("hellaswag", "Beautiful", text)
    lm.generate_until(requests, disable_tqdm=True)
    assert short.args == ("Beautiful", {"until": ["\n"], "max_gen_toks": 8})
    assert long.args == (text, {"until": ["\n"], "max_gen_toks": 8}, {"cut_tokens": len(lm.tok_encode(text)) - 56})

    (request,) = instances("loglikelihood", [(text, "ugly")])
    lm.loglikelihood([request, request], disable_tqdm=True)
    assert request.args == (text, "ugly", {"cut_tokens": len(lm.tok_encode(text + "ugly")) - 65})


@pytest.mark.parametrize(
    ("task", "options", "context", "prompt"),
    [
        ("hellaswag", {"truncation": "error"}, "of hellaswag to fit into max_length=64", "found 1 of 2 longer"),
        ("sb_span", {}, "of sb_span to fit into max_length=64", "to generate of sb_span to fit"),
    ],
)
def test_long_texts_are_an_error_where_asked_and_in_our_own_tasks(task, options, context, prompt, checkpoint):
    lm = load_lm(checkpoint("llama"), max_length=64, **options)
    needed = len(lm.tok_encode("ab" * 200 + "ugly")) - 1
    with pytest.raises(UserError, match=rf"{context}.* pass max_length={needed} in"):
        lm.loglikelihood(instances("loglikelihood", [("ab" * 200, "ugly")], task), disable_tqdm=True)
    needed = len(lm.tok_encode("ab" * 200)) + 8
    with pytest.raises(UserError, match=rf"{prompt}.* pass max_length={needed} in"):
        lm.generate_until(prompts(task, "ab", "ab" * 200), disable_tqdm=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_gen_toks": 64}, "max_gen_toks to be less than max_length=64, found 64"),
        ({"max_gen_toks": 0}, "max_gen_toks of at least one token, found 0"),
        ({"temprature": 1}, r"not know some generation arguments .*\['temprature'\].*: correct them in"),
        ({"until": ["x", 7]}, "until to be text, a list of texts or null, found 7 in it"),
    ],
)
def test_wrong_generation_arguments_are_named(setting, message, checkpoint):
    with pytest.raises(UserError, match=message):
        load_lm(checkpoint("llama"), max_length=64).generate_until(prompts("t", "a", **setting), disable_tqdm=True)


def test_another_softmax_dtype_is_said_to_do_nothing_and_a_continuation_beyond_max_length_is_an_error(
    checkpoint, caplog
):
    lm = load_lm(checkpoint("llama"), softmax_dtype="float64", max_length=64)
    assert "softmax_dtype is not used" in caplog.text
    with pytest.raises(UserError, match="continuations of at most max_length=64 tokens, found one of 99"):
        likelihoods(lm, [("a", "b" * 99)])


def test_no_line_of_the_log_acts_on_a_terminal_once_a_model_is_loaded(checkpoint):
    logging.setLogRecordFactory(logging.LogRecord)
    load_lm(checkpoint("llama"))
    record = logging.getLogger("lm_eval").makeRecord("lm_eval", logging.INFO, "", 1, "a %s\n", ("\x1b[2J",), None)
    assert record.getMessage() == "a \\x1b[2J\n"


def test_the_device_that_lm_eval_names_by_default_is_never_refused():
    check_shared_arguments({"device": "cuda:0"}, AdapterOptions())


def test_a_subfolder_that_lm_eval_reads_as_a_number_is_text(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama"), tmp_path / "1000")
    assert model_tokenizer({"pretrained": str(tmp_path), "subfolder": 1000}, "a task")
    check_shared_arguments(given := {"subfolder": 1000}, AdapterOptions())
    assert given == {"subfolder": "1000"}


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        (["config.json", "m.gguf"], {"gguf_file": "m.gguf"}),
        (["config.json", "step1/config.json", "step1/tokenizer.json"], {"subfolder": "step1"}),
        (["checkpoint/config.json", "checkpoint/vocab.txt"], {"subfolder": "checkpoint"}),
        (["config.json", "tekken.json"], {}),
        (["config.json"], {"tokenizer": "elsewhere"}),
    ],
)
def test_checkpoint_files_may_lie_as_hf_takes_them(files, arguments, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    check_early({"pretrained": str(tmp_path), **arguments})
