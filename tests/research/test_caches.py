"""The measurement that reads a context once for all caches gives the scores of runs with each cache."""

import numpy as np
import pytest
import torch

from research.decoding_studies.rounded_caches import rounded_fp8, rounded_int8
from research.real_models.caches import FULL, nats_by_cache
from sbeval.caches.build import CacheBuilder
from sbeval.caches.choice import parse_cache
from sbeval.corpora import resolve_tokens
from sbeval.scoring.requests import TokenLogprobsRequest
from tests.model_adapters.conftest import checkpoint, corpus  # noqa: F401  fixtures
from tests.model_adapters.small import NEEDS_QUANTIZED_CACHES, instances, load_lm, windows

pytest.importorskip("hqq", reason="the extra sbeval[cache] brings it")
pytest.importorskip("optimum.quanto", reason="the extra sbeval[cache] brings it")
pytestmark = NEEDS_QUANTIZED_CACHES
NAMES = ("quantized:8", "quantized:4", "quantized:2")


@pytest.mark.parametrize("model", ["llama", "stickbreaking"])
def test_one_prefill_for_all_caches_gives_the_scores_of_single_runs(checkpoint, corpus, model):  # noqa: F811
    plain = load_lm(checkpoint(model))
    requests = instances("token_logprobs", windows(corpus, [(90, 200, 150)]))
    request = TokenLogprobsRequest(*requests[0].args)
    tokens = torch.tensor([request.lead_in, *resolve_tokens(request.key).tolist()])
    builders = [CacheBuilder.of(plain.model, parse_cache(name)) for name in NAMES]
    sums = nats_by_cache(plain.model, tokens[None, :-1], tokens[-150:], builders)
    for name in (FULL, *NAMES):
        lm = plain if name == FULL else load_lm(checkpoint(model), cache=name)
        (answer,) = lm.token_logprobs(requests, disable_tqdm=True)
        assert sums[name] == pytest.approx(-float(answer), abs=2e-3)
    assert abs(sums["quantized:2"] - sums[FULL]) > 0.1


def test_eight_bits_round_each_head_to_its_own_scale():
    x = torch.tensor([[1.0, -127.0, 0.4, 63.49], [0.001, 0.0, -0.002, 0.0005]], dtype=torch.float64)
    np.testing.assert_allclose(rounded_int8(x)[0], [1, -127, 0, 63])
    np.testing.assert_allclose(rounded_int8(x)[1], np.array([64, 0, -127, 32]) * 0.002 / 127, rtol=1e-12)
    # float8_e4m3fn has three bits of mantissa: the relative error is at most 2**-4
    assert (rounded_fp8(x) / x - 1).abs().nan_to_num().max() <= 2**-4
