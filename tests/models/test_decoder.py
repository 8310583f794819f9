import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, silu
from torch.testing import assert_close

from sbeval.errors import UserError
from sbeval.models import SbevalForCausalLM
from tests.models.small import VARIANTS, small_config, small_model, tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_never_change_earlier_logits(variant: str) -> None:
    model, ids = small_model(**VARIANTS[variant]), tokens(1, 24)
    changed = ids.clone()
    changed[:, 15] = (ids[:, 15] + 7) % 61
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    # experts get other numbers of tokens, which their products may add in another order
    assert_equal_but_for_rounding(before[:, :15], after[:, :15])
    assert (before[:, 15:] - after[:, 15:]).abs().amax(-1).min() > 1e-4


def test_a_strictly_causal_first_row_sees_no_value() -> None:
    model = small_model(num_hidden_layers=1)
    seen: list[Tensor] = []
    model.model.layers[0].self_attn.mixer.register_forward_hook(lambda *hook: seen.append(hook[2]))
    with torch.no_grad():
        model(tokens(2, 5))
    assert torch.equal(seen[0][:, :, 0], torch.zeros(2, 4, 8))
    assert seen[0][:, :, 1].abs().min() > 0


@pytest.mark.parametrize("attention", ["stickbreaking", "rope", "nope"])
def test_grouped_heads_equal_expanded_heads(attention: str) -> None:
    grouped = small_model(attention=attention, num_key_value_heads=2)
    full = SbevalForCausalLM(small_config(attention=attention)).eval()
    weights = grouped.state_dict()
    for name in list(weights):
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    full.load_state_dict(weights)
    with torch.no_grad():
        assert_close(grouped(tokens(2, 19)).logits, full(tokens(2, 19)).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remainder", ["none", "value", "head_bias"])
@pytest.mark.parametrize("head_norm", [False, True])
def test_stickbreaking_equals_its_definition_written_out(remainder: str, head_norm: bool) -> None:
    model = small_model(
        remainder=remainder,
        head_norm=head_norm,
        num_hidden_layers=1,
        attention_multiplier=0.4,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        logits_divisor=1.7,
    )
    ids = tokens(1, 12)[0]
    weights = model.state_dict()
    block = {name.removeprefix("model.layers.0."): value for name, value in weights.items()}
    x = weights["model.embed_tokens.weight"][ids] * 3.0
    normed = rms_norm(x, (32,), block["input_norm.weight"], 1e-5)
    q, k, v = ((normed @ block[f"self_attn.{name}_proj.weight"].T).view(12, 4, 8) for name in "qkv")
    heads = torch.zeros(12, 4, 8)
    for head in range(4):
        for j in range(12):
            stick = 1.0
            for i in reversed(range(j)):
                beta = torch.sigmoid(0.4 * q[j, head] @ k[i, head])
                heads[j, head] += stick * beta * v[i, head]
                stick = stick * (1 - beta)
            if remainder == "value":
                heads[j, head] += stick * v[j, head]
            if remainder == "head_bias":
                heads[j, head] += stick * block["self_attn.mixer.head_bias"][head]
    if head_norm:
        centred = heads - heads.mean(-1, keepdim=True)
        heads = centred / (heads.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        heads = heads * block["self_attn.head_norm.weight"].view(4, 8) + block["self_attn.head_norm.bias"].view(4, 8)
    x = x + 0.7 * heads.flatten(1) @ block["self_attn.o_proj.weight"].T
    normed = rms_norm(x, (32,), block["post_attention_norm.weight"], 1e-5)
    inner = silu(normed @ block["mlp.gate_proj.weight"].T) * (normed @ block["mlp.up_proj.weight"].T)
    x = x + 0.7 * inner @ block["mlp.down_proj.weight"].T
    hidden = rms_norm(x, (32,), weights["model.norm.weight"], 1e-5)
    logits = hidden @ weights["lm_head.weight"].T / 1.7
    with torch.no_grad():
        assert_close(model(ids[None]).logits[0], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("multiplier", ["attention", "embedding", "residual"])
def test_each_multiplier_changes_the_logits_and_one_is_its_default(multiplier: str) -> None:
    name = f"{multiplier}_multiplier"
    neutral = 8**-0.5 if multiplier == "attention" else 1.0
    with torch.no_grad():
        default, same, other = (
            small_model(**fields)(tokens(1, 9)).logits for fields in ({}, {name: neutral}, {name: 0.5})
        )
    assert_close(default, same)
    assert (default - other).abs().max() > 1e-2


def test_the_loss_is_the_mean_over_next_tokens() -> None:
    model, ids = small_model(), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        outputs = model(ids, labels=labels)
    expected = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(outputs.loss, expected)


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 5, 2])])
def test_kept_logits_are_those_of_the_full_pass(kept: int | Tensor) -> None:
    model, ids = small_model(logits_divisor=2.0), tokens(2, 9)
    positions = torch.arange(9)[-kept:] if isinstance(kept, int) else kept
    with torch.no_grad():
        assert_close(model(ids, logits_to_keep=kept).logits, model(ids).logits[:, positions])


def test_head_logits_of_the_last_hidden_state_are_the_logits() -> None:
    model, ids = small_model(logits_divisor=2.0), tokens(2, 9)
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        assert_close(model.head_logits(hidden), model(ids).logits)


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_implementations_give_the_same_logits(impl: str) -> None:
    model, ids = small_model(remainder="head_bias"), tokens(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_kernels(impl=impl)  # type: ignore[arg-type]
        assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


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
