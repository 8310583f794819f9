"""Changes that move a model's logits are undone one by one; what rounding moves is no reason to."""

import logging
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from torch import nn

from sbeval.model_adapters.prepare import trial as module
from sbeval.model_adapters.prepare.change import Change, Setting
from sbeval.model_adapters.prepare.changes.linear import AlignedLinear
from sbeval.model_adapters.prepare.changes.mlps import FusedGatedMLP
from sbeval.model_adapters.prepare.prepared import CHANGES, prepare
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.prepare.trial import Trial
from tests.model_adapters.prepare.faster import PARTS, replaced
from tests.model_adapters.small import odd, tiny_tokenizer

TOKENS = torch.arange(40)[None]


def deep(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of random weights in which rounding adds up over twelve layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    config = transformers.LlamaConfig(vocab_size=320, num_hidden_layers=12, num_key_value_heads=2, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def scaled(name: str, factor: float, place: str = "model.layers.0.mlp.down_proj") -> Change:
    """A change that scales the output of a linear layer."""

    def apply(model: Any, setting: Setting) -> Any:
        hook = model.get_submodule(place).register_forward_hook(lambda _, __, output: output * factor)
        return hook.remove

    return Change(name=name, apply=apply, judged=True)


@pytest.mark.parametrize("guilty", range(3))
def test_of_several_changes_the_one_that_moves_the_logits_is_undone_alone(guilty, caplog):
    model = odd("llama")
    harmless = [scaled(f"change {index}", 1.0, f"model.layers.{index % 2}.self_attn.o_proj") for index in range(2)]
    changes = (*harmless[:guilty], scaled("halved MLPs", 0.5), *harmless[guilty:])
    with caplog.at_level(logging.WARNING):
        prepared = prepare(model, None, Setting(), changes)
    assert prepared.kept == ("change 0", "change 1")
    (note,) = prepared.notes
    assert note.startswith("halved MLPs changed the logits of LlamaForCausalLM by ")
    assert note.endswith("; they are switched off")
    assert [record.getMessage() for record in caplog.records] == [note]


def test_a_part_that_differs_is_given_back_and_every_other_one_stays():
    model = odd("llama")
    expected = model(TOKENS).logits
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) * (1.0 if type(mlp.up_proj) is nn.Linear else 2.0)
    prepared = replaced(model)
    assert "padded linear layers" not in prepared.kept
    assert {"fused norms", "fused MLPs", "fused rotations", "kernels for long attention"} <= {*prepared.kept}
    assert not any(isinstance(module, AlignedLinear) for module in model.modules())
    assert isinstance(model.model.norm, nn.RMSNorm)
    assert isinstance(model.model.layers[1].mlp, FusedGatedMLP)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_what_was_replaced_is_given_back_to_the_bit():
    model = odd("llama")
    expected, own = model(TOKENS).logits, {name: type(each) for name, each in model.named_modules()}
    prepared = replaced(model)
    assert {type(each) for each in model.modules()} != {*own.values()}
    prepared.give_back()
    assert {name: type(each) for name, each in model.named_modules()} == own
    assert not [name for name, each in model.named_modules() if "forward" in vars(each)]
    assert torch.equal(model(TOKENS).logits, expected)


def test_a_change_with_which_the_model_does_not_run_is_undone_and_the_note_says_why():
    def apply(model: Any, setting: Setting) -> Any:
        def raises(*_: Any) -> None:
            raise ValueError("no such kernel")

        return model.model.layers[1].register_forward_hook(raises).remove

    model = odd("llama")
    prepared = prepare(model, None, Setting(), (Change(name="broken kernels", apply=apply, judged=True), *PARTS))
    assert prepared.notes == (
        "broken kernels cannot be used with LlamaForCausalLM (no such kernel); they are switched off",
    )
    assert prepared.kept == ()  # those that a CPU does not want


@pytest.mark.parametrize("layer", [0, 5, 11])
@pytest.mark.parametrize("kind", ["real tokens", "no tokenizer"])
def test_a_missing_mlp_is_caught_in_a_deep_model_in_bf16(layer, kind):
    tokenizer = tiny_tokenizer(adds_bos=False) if kind == "real tokens" else None
    prepared = prepare(deep(), tokenizer, Setting(), (scaled("no MLPs", 0.0, f"model.layers.{layer}.mlp.down_proj"),))
    assert prepared.kept == ()


@torch.no_grad()
def test_a_wrong_rotation_is_caught_in_a_deep_model_in_bf16():
    def apply(model: Any, setting: Setting) -> Any:
        return model.model.rotary_emb.register_forward_hook(lambda _, __, angles: (angles[0], -angles[1])).remove

    model = deep()
    for layer in model.model.layers:  # attention that is not as even as that of small random weights
        layer.self_attn.q_proj.weight *= 10
        layer.self_attn.k_proj.weight *= 10
    assert prepare(model, None, Setting(), (Change(name="wrong", apply=apply, judged=True),)).kept == ()


@torch.no_grad()
def test_rounding_that_adds_up_in_depth_is_no_reason_to_undo_a_change(monkeypatch):
    """Norms that round the normed values once more, as a kernel may, pass where a constant would refuse them."""
    model = deep()
    monkeypatch.setattr(module, "least", lambda dtype, device: 0.0)  # so that the limit is the model's own

    def apply(model: Any, setting: Setting) -> Any:
        generator = torch.Generator().manual_seed(7)

        def rounds(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            up = 1 + torch.finfo(output.dtype).eps / 2 * (2 * torch.rand(output.shape, generator=generator) - 1)
            return (output.float() * up).to(output.dtype)

        hooks = [each.register_forward_hook(rounds) for each in model.modules() if "Norm" in type(each).__name__]
        return lambda: [hook.remove() for hook in hooks]

    assert prepare(model, None, Setting(), (Change(name="rounded norms", apply=apply, judged=True),)).kept


def test_the_sample_is_text_and_never_special_tokens():
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokens = sample_tokens(tokenizer, 320, 64)
    assert len(tokens) == 64
    assert not {*tokens} & {*tokenizer.all_special_ids}
    assert len({*tokens}) > 20
    spread = sample_tokens(None, 49152, 64)
    assert len({*spread}) == 64
    assert min(spread) > 1000
    assert max(spread) < 49152 - 1000
    assert sample_tokens(None, 3, 5) == [0, 1, 2, 0, 1] or len(sample_tokens(None, 3, 5)) == 5


def test_a_model_that_gives_no_logits_keeps_its_own_parts_and_the_note_says_why():
    model = odd("llama")
    model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no memory for this")))
    prepared = replaced(model)
    assert prepared.kept == ()
    assert prepared.notes == (
        "LlamaForCausalLM stays as it is: it gives no logits to compare with (no memory for this)",
    )


def test_every_change_has_a_name_of_its_own_and_a_plain_run_on_a_cpu_judges_none(monkeypatch):
    assert len({change.name for change in CHANGES}) == len(CHANGES)
    monkeypatch.setattr(Trial, "begin", lambda _: pytest.fail("the model was read"))
    model = odd("llama")
    expected = model(TOKENS).logits
    prepare(model, None, Setting())
    assert torch.equal(model(TOKENS).logits, expected)


def worker(rank: int, out: Any) -> None:
    torch.distributed.init_process_group("gloo")
    model = odd("llama")
    if rank == 1:  # sees nothing wrong
        Trial.difference = lambda _: 0.0  # type: ignore[method-assign]
    changes = (scaled("halved MLPs", 0.5), scaled("copies", 1.0))
    prepared = prepare(model, None, Setting(rank=rank, processes=2), changes)
    torch.save((prepared.kept, prepared.notes, model(TOKENS).logits), out / f"{rank}.pt")


@pytest.mark.exhaustive
def test_the_first_of_several_processes_decides_for_all(tmp_path):
    run_ranks(worker, tmp_path, processes=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first[0] == second[0] == ("copies",)
    assert first[1] == second[1]
    assert torch.equal(first[2], second[2])
