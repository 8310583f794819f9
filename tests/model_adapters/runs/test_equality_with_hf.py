"""lm-eval's own request types give what `hf` gives, in fp32, for models of many kinds."""

from typing import Any

import pytest
import torch
import transformers
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from packaging.version import Version

from sbeval.model_adapters.lm import StickBreakingLM
from tests.marks import exhaustive
from tests.model_adapters.small import Checkpoints, both, english, generated, instances

ALL = [
    *("llama", "gemma3", "mistral", "gpt2", "stickbreaking", "rope"),
    *exhaustive("qwen3", "gemma2", "granite", "cohere", "gpt_neox"),
]
RTOL = 1e-5


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "adds-bos"])
@pytest.mark.parametrize("architecture", ALL)
def test_scores_and_text_equal_hf(architecture: str, adds_bos: bool, checkpoint: Checkpoints) -> None:
    # transformers before 5.21 leaves out the soft cap of Gemma 2's logits in sdpa, which sb's self-test finds
    eager = architecture == "gemma2" and Version(transformers.__version__).release < (5, 21)
    options = {"attn_implementation": "eager"} if eager else {}
    hf, sb = both(checkpoint(architecture, adds_bos=adds_bos), batch_size=3, **options)
    lines = [line for line in english().splitlines() if line]
    pairs = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines]
    pairs += [
        ("", "Namespaces are one honking great idea"),
        ("Now is better than never. " * 20, "Although never"),
        ("Simple is ", " better"),
    ]
    # multiple choice: one context, several continuations, of one token and of more
    pairs += [("Beautiful is better than", choice) for choice in [" ugly", " a", " b", " implicit", "."]]
    found, expected = (lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True) for lm in (sb, hf))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=RTOL)

    rolling = instances("loglikelihood_rolling", [(english(),), (lines[2],), (english()[:200],), ("",)])
    found, expected = (lm.loglikelihood_rolling(rolling, disable_tqdm=True) for lm in (sb, hf))
    assert found == pytest.approx(expected, rel=RTOL)

    prompts: list[tuple[Any, ...]] = [(line, {"until": ["e"], "max_gen_toks": 8}) for line in lines[:4]]
    prompts += [(english(), {"until": "\n", "max_gen_toks": 5, "do_sample": False})]
    assert generated(sb, prompts) == generated(hf, prompts)


WINDOW = 64


@pytest.mark.parametrize("architecture", ["llama", "granite", "gpt_neox"])
@torch.no_grad()
def test_log_probabilities_in_bf16_are_those_of_the_logits_in_fp64(architecture: str, checkpoint: Checkpoints) -> None:
    folder = str(checkpoint(architecture))
    lm = StickBreakingLM(folder, device="cpu", dtype="bfloat16", max_length=WINDOW)
    (found,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(english(),)]), disable_tqdm=True)
    model, exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), 0.0
    windows = get_rolling_token_windows(lm.tok_encode(english()), 0, WINDOW, 1)
    for context, targets in map(make_disjoint_window, windows):
        logits = model(torch.tensor([(context + targets)[:-1]])).logits[0, -len(targets) :]
        exact += float(logits.double().log_softmax(-1).gather(1, torch.tensor(targets)[:, None]).sum())
    assert found == pytest.approx(exact, rel=1e-6)
