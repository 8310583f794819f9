"""Protocols with a replaced KV cache: those with a context score through it, the others refuse it."""

import pytest
from corpus_problems import run_task, tiny_gpt2, tiny_tokenizer, write_folder

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import NEEDS_QUANTIZED_CACHES

pytest.importorskip("optimum.quanto", reason="the extra sbeval[cache] brings it")
pytestmark = NEEDS_QUANTIZED_CACHES
LENGTHS = [8, 16]


@pytest.fixture
def model_with_cache(tmp_path):
    folder = tiny_gpt2(tmp_path / "gpt2", positions=64)
    tiny_tokenizer().save_pretrained(folder)

    def load(cache=None):
        options = {} if cache is None else {"cache": cache}
        return StickBreakingLM(str(folder), device="cpu", dtype="float32", **options)

    return load


@pytest.fixture
def options(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    texts = write_folder(tmp_path / "texts", [40 + 7 * index for index in range(6)])
    return {"tokenizer": str(tmp_path / "tokenizer"), "data_path": str(texts), "context_lengths": LENGTHS}


@pytest.mark.parametrize("protocol", ["rolling", "stream"])
def test_protocols_without_a_context_refuse_a_cache(model_with_cache, options, protocol):
    with pytest.raises(UserError, match=f"no meaning for the protocol {protocol}"):
        run_task(f"sb_stdlib_{protocol}", model_with_cache("quantized:2"), options)


@pytest.mark.parametrize("protocol", ["fixed_target", "position", "sliding"])
def test_protocols_with_a_context_score_through_the_cache(model_with_cache, options, protocol):
    full = run_task(f"sb_stdlib_{protocol}", model_with_cache(), options)["values"]
    rounded = run_task(f"sb_stdlib_{protocol}", model_with_cache("quantized:2"), options)["values"]
    numbers = [name for name in full if name.startswith("nll@") and isinstance(full[name], float)]
    assert numbers
    for name in numbers:
        assert rounded[name] != full[name]
        assert rounded[name] == pytest.approx(full[name], abs=2.0)
