"""Answers as response caches keep them."""

import pickle

import numpy as np
import pytest
from fresh_process import run_code

from sbeval.scoring.requests import TargetLogprobs, TokenLogprobs

LOGPROBS = np.array([-0.5, -1.25], dtype=np.float32)


@pytest.mark.parametrize(
    ("answer", "former"),
    [
        (TokenLogprobs(LOGPROBS), b"sbeval.token_logprobs"),
        (TargetLogprobs(LOGPROBS, np.array([True, False])), b"sbeval.target_logprobs"),
    ],
    ids=["token_logprobs", "target_logprobs"],
)
def test_answers_kept_under_the_modules_former_names_are_read(answer: float, former: bytes) -> None:
    kept = pickle.dumps(answer, protocol=2).replace(b"sbeval.scoring.requests", former)
    assert former in kept
    lines = run_code(
        "import pickle, sbeval.scoring.requests\n"
        f"answer = pickle.loads(bytes.fromhex({kept.hex()!r}))\n"
        "print(float(answer), answer.logprobs.tolist())"
    )
    assert lines == [f"{float(answer)} {LOGPROBS.tolist()}"]
