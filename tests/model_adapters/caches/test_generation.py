"""Generation with a replaced KV cache: the answers are those of transformers' `generate` with that cache."""

import pytest
import torch
from transformers import QuantizedCache

from sbeval.errors import UserError
from sbeval.scoring.body import cache_argument
from tests.model_adapters.small import LINES, NEEDS_QUANTIZED_CACHES, generated, load_lm

pytest.importorskip("optimum.quanto", reason="the extra sbeval[cache] brings it")
pytestmark = NEEDS_QUANTIZED_CACHES
SETTING = {"until": [], "max_gen_toks": 12}
PROMPTS = [LINES[0], LINES[1], LINES[2][:9]]


@pytest.mark.parametrize("model", ["llama", "rope", "stickbreaking"])
def test_answers_are_generated_with_the_quantized_cache(checkpoint, model):
    lm, full = load_lm(checkpoint(model), cache="quantized:2"), load_lm(checkpoint(model))
    found = generated(lm, [(prompt, SETTING) for prompt in PROMPTS])
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([lm.tok_encode(prompt)])
        cache = QuantizedCache("quanto", lm.model.config, nbits=2, q_group_size=8)
        output = full.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=2,
            **{cache_argument(full.model): cache},
        )
        expected.append(lm.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    assert [text.strip() for text in found] == [text.strip() for text in expected]


@pytest.mark.exhaustive
def test_few_bits_change_answers_and_a_full_cache_does_not(checkpoint, my_caches):
    asked = [(line, {"until": [], "max_gen_toks": 24}) for line in LINES]
    plain = generated(load_lm(checkpoint("llama")), asked)
    assert generated(load_lm(checkpoint("llama"), cache=f"{my_caches}:full"), asked) == plain
    assert generated(load_lm(checkpoint("llama"), cache="static"), asked) == plain
    assert generated(load_lm(checkpoint("llama"), cache="quantized:2"), asked) != plain


@pytest.mark.parametrize("name", ["cache_implementation", "prompt_lookup_num_tokens", "assistant_model"])
def test_a_request_with_another_cache_or_drafts_is_refused(checkpoint, name):
    lm = load_lm(checkpoint("llama"), cache="quantized:4")
    with pytest.raises(UserError, match=f"A request sets {name}, but cache=quantized:4 is set"):
        generated(lm, [(LINES[0], {**SETTING, name: 2})])


def test_a_cache_that_fails_while_it_is_generated_from_is_a_sentence(checkpoint, my_caches):
    lm = load_lm(checkpoint("llama"), cache=f"{my_caches}:breaks_at_60")
    assert generated(lm, [("Now is", {**SETTING, "max_gen_toks": 4})])
    with pytest.raises(UserError, match=r"breaks_at_60 cannot be read with LlamaForCausalLM .full.: correct the func"):
        generated(lm, [(" ".join(LINES[:8])[:300], SETTING)])
