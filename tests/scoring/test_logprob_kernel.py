"""The one-pass kernel gives what PyTorch's log-softmax and argmax give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.scoring.logprob_kernel import kernel_target_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernel runs in Triton's interpreter


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocabulary=st.sampled_from([1, 61, 4096, 4097, 9000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
    aligned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_log_probabilities_and_greedy_tokens_equal_pytorch(
    rows: int, vocabulary: int, dtype: torch.dtype, scale: float, aligned: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = -(-vocabulary // 16) * 16 + (0 if aligned else 3)
    padded = (scale * torch.randn(rows, width, generator=generator)).to(DEVICE, dtype)
    logits = padded[:, :vocabulary]  # rows that lie apart
    target = torch.randint(0, vocabulary, (rows,), generator=generator).to(DEVICE)
    target[0] = logits[0].argmax()
    logprobs, greedy = kernel_target_logprobs(logits, target)
    expected = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=3e-6 + 4e-7 * scale)
    assert greedy.tolist() == (logits.argmax(-1) == target).tolist()


def test_the_first_of_equal_logits_is_the_most_probable_token() -> None:
    logits = torch.zeros(3, 5000, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 7] = logits[:, 4500] = 1.0
    _, greedy = kernel_target_logprobs(logits, torch.tensor([7, 4500, 0], device=DEVICE))
    assert greedy.tolist() == [True, False, False]


@pytest.mark.parametrize("place", [60, 4200])
@pytest.mark.parametrize("target", [60, 61, 8999])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_finite_number(value: float, target: int, place: int) -> None:
    logits = torch.zeros(1, 9008, device=DEVICE)
    logits[0, place] = value
    logprobs, _ = kernel_target_logprobs(logits, torch.tensor([target], device=DEVICE))
    assert not torch.isfinite(logprobs).any()


@pytest.mark.parametrize("before", [0, 4095, 4096, 4100])
def test_an_equal_logit_before_the_target_is_the_most_probable_token_instead(before: int) -> None:
    logits = torch.zeros(2, 9008, device=DEVICE)
    logits[:, 4101] = 1.0
    logits[1, before] = 1.0
    _, greedy = kernel_target_logprobs(logits, torch.tensor([4101, 4101], device=DEVICE))
    assert greedy.tolist() == [True, False]


@pytest.mark.parametrize("target", [-1, 100, 5000])
def test_a_target_beyond_the_row_gives_no_finite_number(target: int) -> None:
    logits = torch.zeros(2, 100, device=DEVICE)
    logprobs, greedy = kernel_target_logprobs(logits, torch.tensor([target, 3], device=DEVICE))
    assert torch.isfinite(logprobs).tolist() == [False, True]
    assert greedy.tolist() == [False, False]


def test_a_row_where_everything_but_the_target_is_impossible() -> None:
    logits = torch.full((1, 9000), -torch.inf, device=DEVICE)
    logits[0, 8000] = -3.0
    logprobs, greedy = kernel_target_logprobs(logits, torch.tensor([8000], device=DEVICE))
    assert logprobs.tolist() == [0.0]
    assert greedy.tolist() == [True]
