"""Arguments of `hf` that users know mean the same with `sb`."""

import json
import shutil
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from packaging.version import Version
from safetensors.torch import load_file, save_file

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from tests.marks import exhaustive
from tests.model_adapters import small
from tests.model_adapters.small import LINES as ALL_LINES

LINES = ALL_LINES[:8]
PAIRS = [*((line[:9], line[9:]) for line in LINES), ("", "There should be one"), ("and", " o")]
PROMPTS = [(line, {"until": ["e"], "max_gen_toks": 6}) for line in LINES]


def assert_equal(hf: HFLM, sb: StickBreakingLM, rel: float = 1e-5) -> None:
    assert small.likelihoods(sb, PAIRS) == pytest.approx(small.likelihoods(hf, PAIRS), rel=rel)
    rolling = small.instances("loglikelihood_rolling", [("\n".join(LINES),)])
    assert sb.loglikelihood_rolling(rolling) == pytest.approx(hf.loglikelihood_rolling(rolling), rel=rel)
    assert small.generated(sb, PROMPTS) == small.generated(hf, PROMPTS)


def test_a_lora_adapter(checkpoint, tmp_path):
    hf, sb = small.both(
        checkpoint("llama"), peft=small.save_lora(tmp_path, checkpoint("llama"), "q_proj", "v_proj", seed=1)
    )
    assert_equal(hf, sb)
    plain = small.both(checkpoint("llama"))[1]
    assert small.likelihoods(sb, PAIRS[:1]) != pytest.approx(small.likelihoods(plain, PAIRS[:1]), rel=1e-3)


def test_an_adapter_that_lacks_a_weight_is_refused(checkpoint, tmp_path):
    adapter = small.save_lora(tmp_path, checkpoint("llama"), "q_proj")
    weights = load_file(tmp_path / "adapter_model.safetensors")
    del weights[min(weights)]
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"all its weights at peft={tmp_path}, found some missing"):
        small.load_lm(checkpoint("llama"), peft=adapter)


def test_weights_of_an_adapter_that_the_model_does_not_read_are_refused_unless_they_are_allowed(checkpoint, tmp_path):
    adapter = small.save_lora(tmp_path, checkpoint("llama"), "q_proj", "k_proj")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["q_proj"]}))
    found = rf"does not read 4 tensors of peft={tmp_path} \(\S*layers.0-1.self_attn.k_proj.lora_A"
    with pytest.raises(UserError, match=found):
        small.load_lm(checkpoint("llama"), peft=adapter)
    lm = small.load_lm(checkpoint("llama"), peft=adapter, allow_unread="*.k_proj.*")
    lines = [f"base_model.model.model.layers.0-1.self_attn.k_proj.lora_{name}.weight" for name in "AB"]
    assert lm.get_model_info()["sbeval"]["unread"] == {"allowed": lines, "declared": []}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"parallelize": True},
        pytest.param({"tp_plan": "auto"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a launch")),
        {"attn_implementation": "eager"},
    ],
)
def test_tensors_that_the_model_does_not_read_are_refused_unless_they_are_allowed(arguments, checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=rf"does not read 9 tensors of {folder} \(model.layers.1"):
        small.load_lm(folder, **arguments)
    lm = small.load_lm(folder, allow_unread=True, **arguments)
    unread = lm.get_model_info()["sbeval"]["unread"]
    assert ("model.layers.1.mlp.up_proj.weight" in unread["allowed"], unread["declared"]) == (True, [])
    assert small.load_lm(checkpoint("llama"), **arguments).get_model_info()["sbeval"]["unread"] is None


def test_a_shard_that_no_index_names_is_allowed_and_recorded_like_other_unread_tensors(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    save_file({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(UserError, match=r"does not read 1 tensor of .*model-00002-of-00002.safetensors"):
        small.load_lm(folder)
    lm = small.load_lm(folder, allow_unread="*.up_proj.*")
    assert lm.get_model_info()["sbeval"]["unread"] == {"allowed": ["model.layers.9.mlp.up_proj.weight"], "declared": []}


def nll_of(model: Any, tokens: list[int]) -> float:
    """The NLL of all tokens but the first, in nats, from one forward pass."""
    inputs, targets = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(input_ids=inputs).logits[0], targets, reduction="sum"))


@pytest.mark.parametrize("in_memory", [False, True], ids=["from a folder", "in memory"])
def test_an_output_matrix_that_differs_from_the_embeddings_stays_whatever_the_configuration_says(
    in_memory, checkpoint, tmp_path
):
    folder = small.copied(checkpoint("llama"), tmp_path / "untied", tie_word_embeddings=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    given = transformers.AutoModelForCausalLM.from_pretrained(folder) if in_memory else folder
    options = {"tokenizer": str(folder)} if in_memory else {}
    lm = StickBreakingLM(given if in_memory else str(given), device="cpu", dtype="float32", **options)
    assert not torch.equal(lm.model.lm_head.weight, lm.model.model.embed_tokens.weight)
    (found,) = lm.loglikelihood_rolling(small.instances("loglikelihood_rolling", [(LINES[0],)]))
    tokens = [lm.prefix_token_id, *lm.tok_encode(LINES[0], add_special_tokens=False)]
    assert -found == pytest.approx(nll_of(plain, tokens), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("trained", ["lm_head", "embed_tokens"])
def test_an_adapter_may_train_one_of_two_matrices_that_its_model_shares(trained, checkpoint, tmp_path):
    base = checkpoint("qwen3")  # whose output matrix is the embeddings
    load = transformers.AutoModelForCausalLM.from_pretrained
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[trained], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(base), config)
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data += torch.randn_like(weight)
    model.save_pretrained(tmp_path)
    lm = small.load_lm(base, peft=str(tmp_path))
    (found,) = lm.loglikelihood_rolling(small.instances("loglikelihood_rolling", [(LINES[0],)]))
    tokens = [lm.prefix_token_id, *lm.tok_encode(LINES[0], add_special_tokens=False)]
    alone = peft.PeftModel.from_pretrained(load(base), tmp_path).eval()
    assert -found == pytest.approx(nll_of(alone, tokens), rel=1e-5)


def test_a_learned_prompt(checkpoint, tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    torch.manual_seed(1)
    prompted = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with torch.no_grad():
        prompted.prompt_encoder["default"].embedding.weight.normal_(0, 1)
    prompted.save_pretrained(tmp_path / "prompt")
    hf, sb = small.both(checkpoint("llama"), peft=str(tmp_path / "prompt"))
    assert small.likelihoods(sb, PAIRS) == pytest.approx(small.likelihoods(hf, PAIRS), rel=1e-5)


def test_an_encoder_decoder_model(tmp_path):
    small.t5(tmp_path / "t5")
    assert_equal(*small.both(tmp_path / "t5", max_length=64))
    with pytest.raises(UserError, match="extrapolation=log_length does not work with an encoder-decoder model"):
        small.load_lm(tmp_path / "t5", extrapolation="log_length")


def test_a_model_that_is_loaded_already(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    assert_equal(*small.both(model, tokenizer=small.tiny_tokenizer(adds_bos=False)))


@pytest.mark.parametrize(
    "options",
    [
        {"revision": "main", "trust_remote_code": True},
        pytest.param(
            {"parallelize": True, "device": "cuda" if torch.cuda.is_available() else "cpu"},
            marks=pytest.mark.skipif(
                not torch.cuda.is_available() and Version(accelerate.__version__) < Version("1.15"),
                reason="accelerate before 1.15 spreads no model without a GPU, in hf as here",
            ),
        ),
        *({"add_bos_token": True}, {"max_length": 30}, {"attn_implementation": "eager"}, {"prefix_token_id": 5}),
        *exhaustive({"device_map": "auto"}, {"tokenizer": "same folder"}, {"logits_cache": False}),
        *exhaustive({"batch_size": "auto:2", "max_batch_size": 4}),
        *exhaustive({"think_end_token": "e", "enable_thinking": False}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_arguments(options, checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("llama")
    monkeypatch.chdir(tmp_path)  # some make a folder for what does not fit into memory
    if "tokenizer" in options:
        options = {"tokenizer": str(folder)}
    assert_equal(*small.both(folder, **options))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"mixed_precision_dtype": "bfloat16"}], ids=str)
def test_half_precision_is_near(options, checkpoint):
    hf, sb = small.both(checkpoint("llama"), **options)
    *near, right = (np.array(small.likelihoods(lm, PAIRS)) for lm in (hf, sb, small.both(checkpoint("llama"))[1]))
    error_of_hf, error = (np.abs(scores - right).sum() for scores in near)
    assert error <= 1.5 * error_of_hf


def test_a_chat_template(checkpoint):
    hf, sb = small.both(checkpoint("llama"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    hf.tokenizer.chat_template = sb.tokenizer.chat_template = template
    chat = [{"role": "user", "content": "Readability counts."}]
    assert sb.apply_chat_template(chat) == hf.apply_chat_template(chat) == "<user>Readability counts."
    assert sb.chat_template(True) == hf.chat_template(True)
