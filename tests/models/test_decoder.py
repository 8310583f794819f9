import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from other_machines import assert_equal_but_for_rounding
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm
from torch.testing import assert_close
from transformers import DynamicCache
from written_out import stick_breaking

from sbeval.errors import UserError
from tests.models.small import VARIANTS, small_model, tokens, written_out


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_never_change_earlier_logits(variant: str) -> None:
    model, ids = small_model(**VARIANTS[variant]), tokens(1, 24)
    changed = ids.clone()
    changed[:, 15] = (ids[:, 15] + 7) % 61
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    # experts get other numbers of tokens, which their products may add in another order
    assert_equal_but_for_rounding(before[:, :15], after[:, :15])
    # entmax may give a key no weight at all
    later = slice(15, 16 if "entmax" in variant else None)
    assert (before[:, later] - after[:, later]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("remainder", ["none", "value", "head_bias"])
@pytest.mark.parametrize("head_norm", [False, True])
@torch.no_grad()
def test_stickbreaking_equals_its_definition_written_out(remainder: str, head_norm: bool) -> None:
    multipliers = {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
    sizes = {"num_hidden_layers": 1, "logits_divisor": 1.7}
    model, ids = small_model(remainder=remainder, head_norm=head_norm, **sizes, **multipliers), tokens(1, 12)[0]

    def mix(q: Tensor, k: Tensor, v: Tensor, normed: Tensor, weights: dict[str, Tensor]) -> Tensor:
        heads, stick = stick_breaking(q, k, v, 0.4)
        if remainder != "none":
            heads = heads + stick * (v if remainder == "value" else weights["mixer.head_bias"])
        if head_norm:
            weight, bias = (weights[f"head_norm.{name}"].view(4, 8) for name in ("weight", "bias"))
            heads = layer_norm(heads, (8,), eps=1e-5) * weight + bias
        return heads

    assert_close(model(ids[None]).logits[0], written_out(model, ids, mix), rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_mean_over_next_tokens() -> None:
    model, ids = small_model(), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        outputs = model(ids, labels=labels)
    assert_close(outputs.loss, cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 5, 2])])
def test_kept_logits_are_those_of_the_full_pass(kept: int | Tensor) -> None:
    model, ids = small_model(logits_divisor=2.0), tokens(2, 9)
    positions = torch.arange(9)[-kept:] if isinstance(kept, int) else kept
    with torch.no_grad():
        assert_close(model(ids, logits_to_keep=kept).logits, model(ids).logits[:, positions])


def test_an_unknown_implementation_reaches_the_operation() -> None:
    model = small_model()
    model.set_kernels(impl="nothing")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="impl must be"):
        model(tokens(1, 4))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_weights_and_bf16_autocast_stay_near_fp32(variant: str) -> None:
    model, ids = small_model(**VARIANTS[variant], initializer_range=0.1), tokens(2, 16)
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(ids).logits
        half = model.to(torch.bfloat16)(ids).logits
    for logits in (mixed, half):
        assert (logits.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_checkpointing_gives_the_same_gradients(variant: str) -> None:
    model, ids = small_model(**VARIANTS[variant]), tokens(2, 12)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().max() > 0, name
        assert_close(gradients[1][name], gradient)


def test_hidden_states_are_those_between_the_blocks_and_attentions_are_refused() -> None:
    model, ids = small_model(), tokens(1, 6)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(ids))
    assert_close(model.head_logits(outputs.hidden_states[-1]), outputs.logits)
    with pytest.raises(UserError, match="output_attentions"):
        model(ids, output_attentions=True)


MODELS = {name: small_model(**fields) for name, fields in VARIANTS.items()}


@torch.no_grad()
def test_a_cache_is_read_by_either_name() -> None:
    # transformers 5.24 renames past_key_values
    model, ids = MODELS["rope"], tokens(2, 11)
    for part in (model, model.model):
        cache = part(ids[:, :-1], use_cache=True).past_key_values
        again = copy.deepcopy(cache)
        named, renamed = part(ids[:, -1:], past_key_values=cache)[0], part(ids[:, -1:], cache=again)[0]
        assert torch.equal(named, renamed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_with_the_cache_are_those_without(variant: str) -> None:
    model, ids = MODELS[variant], tokens(2, 11)
    cached, plain = (
        model.generate(ids, max_new_tokens=16, do_sample=False, use_cache=use_cache, eos_token_id=None)
        for use_cache in (True, False)
    )
    assert cached.shape == (2, 27)
    assert torch.equal(cached, plain)


@settings(max_examples=40, deadline=None)
@given(variant=st.sampled_from(list(VARIANTS)), chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_prefill_in_chunks_equals_one_pass(variant: str, chunks: list[int]) -> None:
    model, ids = MODELS[variant], tokens(2, sum(chunks))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        pieces = [model(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split(chunks, dim=1)]
        assert_close(torch.cat(pieces, dim=1), model(ids).logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padding_changes_nothing(variant: str) -> None:
    model, ids = MODELS[variant], tokens(3, 14)
    pads = [0, 3, 9]
    mask = torch.ones(3, 14, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        generated = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
        for row, pad in enumerate(pads):
            alone = ids[row : row + 1, pad:]
            assert_close(padded[row, pad:], model(alone).logits[0], rtol=1e-4, atol=1e-5)
            tail = model.generate(alone, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, -8:]
            assert torch.equal(generated[row, -8:], tail)


def test_right_padding_without_a_cache_leaves_the_tokens_before_it() -> None:
    model, ids = MODELS["rope"], tokens(1, 10)
    mask = torch.tensor([[1] * 6 + [0] * 4])
    with torch.no_grad():
        assert_close(model(ids, attention_mask=mask).logits[:, :6], model(ids[:, :6]).logits, rtol=1e-4, atol=1e-5)


def test_masks_the_model_cannot_honour_are_refused() -> None:
    model, ids = MODELS["stickbreaking"], tokens(1, 6)
    with pytest.raises(UserError, match="inside a sequence"):
        model(ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))
    with pytest.raises(UserError, match="shape"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6))
    with pytest.raises(UserError, match="pad on the left"):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]), max_new_tokens=2)
    with pytest.raises(UserError, match="packed"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
