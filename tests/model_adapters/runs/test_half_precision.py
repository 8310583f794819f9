"""In bf16 `sb` and `hf` score the same logits: all that separates them is what `hf` rounds after that."""

import math

import pytest
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sbeval.model_adapters.lm import StickBreakingLM
from tests.model_adapters.small import Checkpoints, english, instances

WINDOW = 64


@pytest.mark.parametrize("architecture", ["llama", "granite", "gpt_neox"])
@torch.no_grad()
def test_hf_rounds_log_probabilities_and_their_sum_and_sb_does_not(architecture: str, checkpoint: Checkpoints) -> None:
    folder = str(checkpoint(architecture))
    options = {"device": "cpu", "dtype": "bfloat16", "max_length": WINDOW}
    rolling = instances("loglikelihood_rolling", [(english(),)])
    hf = HFLM(folder, **options)
    (theirs,) = hf.loglikelihood_rolling(rolling, disable_tqdm=True)
    (ours,) = StickBreakingLM(folder, **options).loglikelihood_rolling(rolling, disable_tqdm=True)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokens = hf.tok_encode(english())
    rounded, exact, from_rounded = 0.0, 0.0, 0.0
    for context, targets in map(make_disjoint_window, get_rolling_token_windows(tokens, 0, WINDOW, 1)):
        logits = model(torch.tensor([(context + targets)[:-1]])).logits[0, -len(targets) :]
        chosen = torch.tensor(targets)[:, None]
        in_bf16 = logits.log_softmax(-1).gather(1, chosen)
        rounded += float(in_bf16.sum())
        from_rounded += float(in_bf16.double().sum())
        exact += float(logits.double().log_softmax(-1).gather(1, chosen).sum())
    assert theirs == pytest.approx(rounded, rel=1e-9)
    assert ours == pytest.approx(exact, rel=1e-6)
    assert math.isclose(theirs, ours, rel_tol=2**-8)
    # each of the two roundings is there: of every log-probability, and of their sum
    assert len({rounded, from_rounded, exact}) == 3
