"""Attention spans against plain loops over weights that are computed another way."""

import math
from typing import Any

import pytest
import torch
import transformers
from corpus_problems import sharpened
from written_out import stick_breaking

from sbeval.errors import UserError
from sbeval.models import SbevalConfig
from sbeval.models.attention import SoftmaxMixer, StickBreakingMixer
from sbeval.scoring.spans import SHARES, attention_spans, entropy, spans
from tests.model_adapters.small import SIZES

SIZES = {"vocab_size": 50, **SIZES}
LENGTH, QUERIES = 40, 7


def looped(weights: list[float]) -> list[float]:
    """Spans of one query whose weights are listed from the newest key."""
    total, found = sum(weights), []
    for share in SHARES:
        reached, count = 0.0, 0
        while reached < share * total * (1 - 1e-9):
            reached += weights[count]
            count += 1
        found.append(count)
    return found


def plain(queries: list[list[float]]) -> list[float]:
    """Mean weight on the first token and mean entropy in fp64; each query's weights begin with the newest key."""
    entropies = []
    for weights in queries:
        shares = [weight / sum(weights) for weight in weights]
        entropies.append(-sum(share * math.log(share) for share in shares if share > 0))
    return [sum(weights[-1] for weights in queries) / len(queries), sum(entropies) / len(entropies)]


def test_the_entropy_of_weights_does_not_depend_on_their_sum_and_no_weight_has_none() -> None:
    weights = torch.tensor([[[0.25, 0.25, 0.0, 0.5], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 1.0, 0.0], [0.0] * 4]])
    found = entropy(weights)
    assert found[0, :3].tolist() == pytest.approx([1.5 * math.log(2), math.log(4), 0.0], abs=1e-6)
    assert entropy(weights / 8)[0, :3].tolist() == pytest.approx(found[0, :3].tolist(), abs=1e-6)
    assert found[0, 3].isnan()


@pytest.mark.parametrize("attention", ["stickbreaking", "rope"])
def test_blocks_of_queries_of_any_size_give_the_same_numbers(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = sharpened(transformers.AutoModelForCausalLM.from_config(SbevalConfig(attention=attention, **SIZES)), 6.0)
    tokens = torch.randint(50, (1, LENGTH))
    whole = attention_spans(model, tokens, QUERIES)
    monkeypatch.setattr("sbeval.scoring.spans._BLOCK_WEIGHTS", 1)
    by_query = attention_spans(model, tokens, QUERIES)
    assert [row[2:5] for row in by_query] == [row[2:5] for row in whole]
    assert torch.tensor(by_query) == pytest.approx(torch.tensor(whole), abs=1e-6)


def test_spans_of_known_weights() -> None:
    weights = torch.tensor(
        [[[0.125, 0.0, 0.375, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]], [[0.02, 0.0, 0.0, 0.0, 0.0]] * 2]
    )
    assert spans(weights, torch.tensor([3, 4])).tolist() == [[[1, 4, 4], [1, 1, 1]], [[4, 4, 4], [5, 5, 5]]]
    assert spans(torch.zeros(1, 1, 3), torch.tensor([2])).isnan().all()


def test_softmax_spans_equal_those_of_the_models_own_weights() -> None:
    torch.manual_seed(0)
    model = sharpened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), 6.0)
    tokens = torch.randint(50, (1, LENGTH))
    found = attention_spans(model, tokens, QUERIES)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(tokens, output_attentions=True).attentions
    assert [row[:2] for row in found] == [[layer, head] for layer in range(2) for head in range(4)]
    for layer, head, *own in found:
        rows = [weights[layer][0, head, j, : j + 1].flip(0).tolist() for j in range(LENGTH - QUERIES, LENGTH)]
        expected = torch.tensor([looped(row) for row in rows], dtype=torch.float64).mean(0)
        assert own[:3] == pytest.approx(expected.tolist())
        assert own[3] == 0.0
        assert own[4:] == pytest.approx(plain(rows), abs=1e-5)


@pytest.mark.parametrize("attend_current", [False, True])
def test_stick_breaking_spans_equal_a_loop_that_breaks_sticks(attend_current: bool) -> None:
    torch.manual_seed(1)
    config = SbevalConfig(attention="stickbreaking", attend_current=attend_current, **SIZES)
    model = sharpened(transformers.AutoModelForCausalLM.from_config(config), 6.0)
    seen: list[Any] = []
    mixers = [module for module in model.modules() if isinstance(module, StickBreakingMixer)]
    handles = [
        mixer.register_forward_pre_hook(lambda mixer, args: seen.append((mixer.scale, *args))) for mixer in mixers
    ]
    found = attention_spans(model, torch.randint(50, (1, LENGTH)), QUERIES)
    for handle in handles:
        handle.remove()
    for layer, head, *own in found:
        scale, q, k = seen[int(layer or 0)][:3]
        rows = [q[0, head, :, None], k[0, head // 2, :, None], torch.eye(LENGTH)[:, None]]
        weights, rests = (x[-QUERIES:, 0] for x in stick_breaking(*rows, scale, attend_current=attend_current))
        own_weights = [weights[j, : LENGTH - QUERIES + j + attend_current].flip(0).tolist() for j in range(QUERIES)]
        expected = [looped(row) for row in own_weights]
        assert own[:3] == pytest.approx(torch.tensor(expected, dtype=torch.float64).mean(0).tolist(), abs=0.3)
        assert own[3] == pytest.approx(float(rests.mean()), abs=1e-5)
        assert own[4:] == pytest.approx(plain(own_weights), abs=1e-5)


@pytest.mark.parametrize("attention", ["rope", "nope", "alibi", "nape-asentmax", "rope-entmax15", "fire", "forgetting"])
def test_every_softmax_scheme_of_the_family_is_seen(attention: str) -> None:
    torch.manual_seed(2)
    positions, _, weights = attention.partition("-")
    fields = {"attention": positions, "attention_weights": weights or "softmax"}
    config = SbevalConfig(**fields, sliding_window=9, **SIZES)
    model = sharpened(transformers.AutoModelForCausalLM.from_config(config), 6.0)
    found = attention_spans(model, torch.randint(50, (1, LENGTH)), QUERIES)
    assert len(found) == 8
    assert sum(isinstance(module, SoftmaxMixer) for module in model.modules()) == 2
    assert all(1 <= float(row[2] or 0) <= float(row[3] or 0) <= float(row[4] or 0) <= 9 for row in found)


def test_attention_that_cannot_be_looked_into_is_refused() -> None:
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**SIZES), attn_implementation="eager")
    with pytest.raises(UserError, match="attn_implementation=sdpa"):
        attention_spans(model, torch.randint(50, (1, 10)), 2)
