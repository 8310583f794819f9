"""transformers' own models with `attn_implementation="stickbreaking"`: this family's model is the oracle."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fresh_process import run_code
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.llama.modeling_llama import LlamaAttention

import sbeval
from sbeval.attn_implementation import NAME
from sbeval.models import SbevalConfig, SbevalForCausalLM
from tests.marks import exhaustive

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
DEVICE = os.environ.get("SBEVAL_TEST_DEVICE", "cpu")  # not asked of CUDA: two processes are without it
PLACES = torch.arange(12).remainder(5)[None]
NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_attention_norm"}


def config(**given: Any) -> transformers.PretrainedConfig:
    asked = {**SIZES, "no_rope_layers": [0, 0], "initializer_range": 0.3, "tie_word_embeddings": False, **given}
    made: transformers.PretrainedConfig = transformers.AutoConfig.for_model("smollm3", **asked)
    return made


def named(*, device: str = DEVICE, **given: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config(**given), attn_implementation=NAME).to(device)


def oracle(model: Any) -> SbevalForCausalLM:
    ours = SbevalForCausalLM(SbevalConfig(**SIZES, norm_eps=model.config.rms_norm_eps))
    weights = model.state_dict()
    for theirs, name in NORMS.items():
        weights = {key.replace(theirs, name): weight.clone() for key, weight in weights.items()}
    ours.load_state_dict(weights)
    return ours.to(DEVICE)


def tokens(*shape: int, device: str = DEVICE) -> Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def assert_close(found: Any, expected: Any) -> None:
    rtol, atol = (2e-5, 2e-6) if DEVICE == "cpu" else (1e-3, 1e-4)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_loss_and_gradients_are_those_of_this_family() -> None:
    model, ids = named(), tokens(3, 40)
    ours, found = oracle(model), model(ids, labels=ids)
    expected = ours(ids, labels=ids)
    found.loss.backward(), expected.loss.backward()
    assert_close(found.logits, expected.logits)
    by_name = dict(ours.named_parameters())
    for name, weight in model.named_parameters():
        for theirs, own in NORMS.items():
            name = name.replace(theirs, own)
        assert_close(weight.grad, by_name[name].grad)


def test_padding_changes_nothing_of_a_text() -> None:
    model, ids = named().eval(), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = model(ids, attention_mask=mask)
    assert_close(padded.logits[0, 5:], model(ids[:1, 5:]).logits[0])
    assert_close(padded.logits, oracle(model).eval()(ids, attention_mask=mask).logits)
    assert_close(model(ids, attention_mask=mask.flip(1)).logits[0, :7], model(ids[:1, :7]).logits[0])
    both = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert both[0, 5:].tolist() == model.generate(ids[:1, 5:], max_new_tokens=6, do_sample=False)[0].tolist()


@pytest.mark.parametrize("said_by", ["position_ids", "cu_seq_lens_q", "collator"])
def test_packed_texts_do_not_see_each_other(said_by: str) -> None:
    model, ids = named().eval(), tokens(1, 12)
    places = torch.tensor([[*range(5), *range(3), *range(4)]], device=DEVICE)
    lengths = torch.tensor([0, 5, 8, 12], device=DEVICE)
    given = {"position_ids": {"position_ids": places}, "cu_seq_lens_q": {"cu_seq_lens_q": lengths}}
    if said_by == "collator":
        texts = [{"input_ids": text.tolist()} for text in ids[0].split([5, 3, 4])]
        made = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(texts)
        given["collator"] = {name: torch.as_tensor(made[name], device=DEVICE) for name in made if name != "input_ids"}
    found = model(ids, use_cache=False, **given[said_by]).logits
    alone = [model(text[None]).logits for text in ids[0].split([5, 3, 4])]
    assert_close(found, torch.cat(alone, dim=1))


def test_rows_may_each_hold_several_texts() -> None:
    model, ids = named().eval(), tokens(2, 6)
    places = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]], device=DEVICE)
    found = model(ids, position_ids=places, use_cache=False).logits
    assert_close(found[0, 3:], model(ids[:1, 3:]).logits[0])
    assert_close(found[1, 1:], model(ids[1:, 1:]).logits[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", ["packed", *exhaustive("whole", "padded")])
def test_compiles_without_a_graph_break(batch: str) -> None:
    model, ids = named(), tokens(2, 12)
    given = {
        "whole": {},
        "packed": {"position_ids": PLACES.expand(2, -1).to(DEVICE)},
        "padded": {"attention_mask": (torch.arange(12) >= torch.tensor([[4], [0]])).long().to(DEVICE)},
    }[batch]
    expected = model(ids, labels=ids, use_cache=False, **given)
    expected.loss.backward()
    wanted = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    found = compiled(ids, labels=ids, use_cache=False, **given)
    found.loss.backward()
    assert_close(found.logits, expected.logits)
    assert_close(gradients(model), wanted)


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda", reason="a failed check there ends the process")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_refuses_a_hole_too(backend: str) -> None:
    mask = torch.ones(1, 12).index_fill(1, torch.tensor([3]), 0).long()
    compiled = torch.compile(named().eval(), fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match="padding inside"), torch.no_grad():
        compiled(tokens(1, 12), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    model, ids = named().train(), tokens(2, 12)
    packed = {"position_ids": PLACES.to(DEVICE), "labels": ids, "use_cache": False}
    model(ids, **packed).loss.backward()
    expected = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model(ids, **packed).loss.backward()
    assert_close(gradients(model), expected)


def two_steps(model: Any, ids: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(ids, labels=ids, position_ids=PLACES.to(ids.device), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    logits: Tensor = model(ids).logits
    return logits.detach().cpu()


def sharded(rank: int, file: Path) -> None:
    torch.distributed.init_process_group("gloo")
    model, mesh = named(device="cpu"), init_device_mesh("cpu", (2,))  # whatever device there is
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    logits = two_steps(model, tokens(2, 12, device="cpu"))
    if rank == 0:
        torch.save(logits, file)


@pytest.mark.exhaustive
def test_trains_sharded_over_two_processes(tmp_path: Path) -> None:
    run_ranks(sharded, tmp_path / "logits", processes=2)
    assert_close(torch.load(tmp_path / "logits"), two_steps(named(), tokens(2, 12)))


def trained(model: Any, folder: Path) -> list[float]:
    quiet = {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    arguments = transformers.TrainingArguments(str(folder), max_steps=50, per_device_train_batch_size=4, **quiet)
    rows = [{"input_ids": row, "labels": row} for row in tokens(64, 16, device="cpu")]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.exhaustive
def test_a_trainer_s_losses_over_50_steps_are_those_of_this_family(tmp_path: Path) -> None:
    model = named()
    ours = oracle(model)
    losses = trained(model, tmp_path)
    assert len(losses) == 50
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(trained(ours, tmp_path), rel=1e-4)


class Wrapped(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


KINDS_WITH_POSITIONS = ["llama", "gpt_neox", "phi", "gemma3_text", "cohere2", "granite", "bert"]


@pytest.mark.parametrize("kind", [*KINDS_WITH_POSITIONS, "llama says nope", "granitemoe says nope", "llama wrapped"])
def test_models_whose_layers_have_positions_are_refused(kind: str) -> None:
    kind, _, how = kind.partition(" ")
    small = {**SIZES, **({"head_dim": 8} if kind == "gemma3_text" else {})}
    small |= {"position_embedding_type": "nope"} if how == "says nope" else {}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **small), attn_implementation=NAME
    )
    for layer in model.model.layers if how == "wrapped" else ():
        layer.self_attn.__class__ = Wrapped
    with pytest.raises(sbeval.UserError, match=rf"^Expected .* for attn_implementation='{NAME}', found .*: .*\.$"):
        model.eval().to(DEVICE)(tokens(1, 8))


@pytest.mark.parametrize("kind", ["bloom", "falcon", "sbeval"])
def test_models_that_look_no_attention_up_are_refused(kind: str) -> None:
    asked = transformers.AutoConfig.for_model(kind, **SIZES, **({"attention": "nope"} if kind == "sbeval" else {}))
    with pytest.raises(sbeval.UserError, match="which has its own attention: choose another"):
        transformers.AutoModelForCausalLM.from_config(asked, attn_implementation=NAME)


@pytest.mark.parametrize("kind", ["jamba", "gpt2", "opt", "granitemoehybrid"])
def test_other_layers_without_positions_are_accepted(kind: str) -> None:
    more = {
        "granitemoehybrid": {"position_embedding_type": "nope", "layer_types": ["attention"] * 2, "mamba_n_heads": 4},
        "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "use_mamba_kernels": False},
        "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    }
    small = transformers.AutoConfig.for_model(kind, **SIZES, **more.get(kind, {}))
    model = transformers.AutoModelForCausalLM.from_config(small, attn_implementation=NAME)
    assert model.eval().to(DEVICE)(tokens(1, 8)).logits.isfinite().all()


LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]], device=DEVICE)
REFUSED = {
    "one layer rotates": ({"no_rope_layers": [0, 1]}, {}, "of layer 1, which has them"),
    "dropout": ({"attention_dropout": 0.1}, {}, "found dropout"),
    "local": ({"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, {}, "local"),
    "a mask": ({}, {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool, device=DEVICE)}, "a mask of its own"),
    "a hole": ({}, {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]], device=DEVICE)}, "padding inside"),
    "packed with a cache": ({}, {"position_ids": PLACES[:, :8].to(DEVICE)}, "restart: pass use_cache=False"),
    "packed and padded": (
        {},
        {"attention_mask": LEFT, "cu_seq_lens_q": LEFT.new_tensor([0, 8])},
        "remove attention_ma",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_stickbreaking_over_all_older_keys_is_refused(case: str) -> None:
    settings, given, words = REFUSED[case]
    with pytest.raises(sbeval.UserError, match=words):
        named(**settings).train()(tokens(1, 8), **given)


def test_a_static_cache_is_refused() -> None:
    with pytest.raises(sbeval.UserError, match="remove cache_implementation"):
        named().generate(tokens(1, 8), max_new_tokens=2, cache_implementation="static")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "taken"),
    [("sbeval", False), ("transformers.modeling_utils", False), ("transformers.modeling_utils", True)],
)
def test_the_name_is_known_whichever_is_imported_first_and_left_to_who_has_it(first: str, taken: bool) -> None:
    code = f"""
import {first}
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
if {taken}:
    ALL_ATTENTION_FUNCTIONS.register("{NAME}", print)
import sbeval
print("{NAME}" in ALL_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS["{NAME}"] is print)
"""
    assert run_code(code) == [f"True {taken}"]
