import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import DynamicCache

from sbeval.errors import UserError
from tests.models.small import VARIANTS, small_model, tokens

MODELS = {name: small_model(**fields) for name, fields in VARIANTS.items()}


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
