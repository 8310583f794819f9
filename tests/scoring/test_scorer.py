"""Chunked scoring is the full-logits log-softmax, and says so when a number is not one."""

import pickle

import numpy as np
import pytest
import torch
import transformers
from fresh_process import run_code
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.scoring.logprob_kernel import kernel_target_logprobs
from sbeval.scoring.requests import TargetLogprobs, TokenLogprobs
from sbeval.scoring.scorer import TokenScorer, target_logprobs
from tests.model_adapters.small import ARCHITECTURES

VOCABULARY = 61


def gemma2() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(ARCHITECTURES["gemma2"](VOCABULARY)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 3), length=st.integers(1, 40), chunk_tokens=st.integers(1, 50), seed=st.integers(0, 99))
def test_chunked_scores_equal_fp64_log_softmax(rows, length, chunk_tokens, seed):
    model = gemma2()
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    targets = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    row, position = torch.meshgrid(torch.arange(rows), torch.arange(length), indexing="ij")
    scores = TokenScorer(model, chunk_logits=chunk_tokens * VOCABULARY).score(
        input_ids, row.flatten(), position.flatten(), targets.flatten()
    )
    with torch.no_grad():
        expected = model(input_ids).logits.double().log_softmax(-1)
    torch.testing.assert_close(
        scores.logprobs.double(), expected.gather(2, targets[..., None]).flatten(), rtol=1e-5, atol=1e-6
    )
    assert scores.logprobs.dtype == torch.float32
    assert torch.equal(scores.greedy, (expected.argmax(-1) == targets).flatten())


def opt() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    widths = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "max_position_embeddings": 64}
    config = transformers.OPTConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=2, **widths)
    return transformers.OPTForCausalLM(config).eval()


@pytest.mark.parametrize("make", [gemma2, opt])
def test_only_chunks_of_scored_positions_reach_the_head(make):
    model = make()
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[:-1].numel()))
    scorer = TokenScorer(model, chunk_logits=5 * VOCABULARY)
    input_ids = torch.arange(40)[None]
    scorer.score(input_ids, torch.zeros(12, dtype=torch.long), torch.arange(28, 40), torch.arange(12))
    seen.clear()  # the first call also compares a short input
    scorer.score(input_ids, torch.zeros(12, dtype=torch.long), torch.arange(28, 40), torch.arange(12))
    assert seen == [5, 5, 2]


class TwoBodiedLM(torch.nn.Module):
    """A model whose logits need more than its body's last hidden state: the embedding joins in again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gemma2()
        self.base_model = self.inner.model

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> object:
        hidden = self.base_model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        logits = self.inner.lm_head(hidden + self.base_model.embed_tokens(input_ids))
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


def test_a_model_that_does_not_come_apart_is_scored_by_its_own_forward(caplog):
    model = TwoBodiedLM().eval()
    input_ids = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1))
    position = torch.arange(30)
    scorer = TokenScorer(model, chunk_logits=7 * VOCABULARY)
    scores = scorer.score(input_ids, torch.ones(30, dtype=torch.long), position, position)
    with torch.no_grad():
        logprobs = model(input_ids).logits[1].double().log_softmax(-1)  # type: ignore[attr-defined]
    expected = logprobs.gather(1, position[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs.double(), expected, rtol=1e-5, atol=1e-6)
    assert "runs its ordinary forward" in caplog.text


def test_the_models_forward_is_its_own_again_after_scoring():
    model = gemma2()
    input_ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(input_ids).logits
        TokenScorer(model).score(input_ids, torch.tensor([0]), torch.tensor([19]), torch.tensor([3]))
        after = model(input_ids).logits
    assert torch.equal(before, after)


def test_bf16_logits_are_raised_to_fp32_before_the_sum():
    logits = torch.randn(50, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = torch.arange(50)
    expected = logits.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
    logprobs, _ = target_logprobs(logits, target)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_number_that_is_not_finite_is_an_error_naming_position_and_length(value):
    model = opt()

    def spoil_the_logits_of_token_7(_module: torch.nn.Module, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([7]), value)

    model.lm_head.register_forward_hook(spoil_the_logits_of_token_7)
    input_ids = torch.arange(2, 22)[None]
    position = torch.arange(4, 20)
    scored_from = 4 if value != value else 7  # NaN spoils the sum of every position, -inf the token itself
    asked, scorer = (input_ids, torch.zeros(16, dtype=torch.long), position, position), TokenScorer(model)
    with pytest.raises(UserError, match=f"{value} for the token after position {scored_from} of an input of 20 tokens"):
        scorer.score(*asked)
    with pytest.raises(UserError, match=f"{value} for the token after position {scored_from + 5} of an input of 25"):
        scorer.score(*asked, after=scorer.read(torch.arange(5)))


@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_the_model_does_not_know_is_named(target):
    asked = torch.arange(20)[None], torch.zeros(2, dtype=torch.long), torch.tensor([3, 19]), torch.tensor([5, target])
    with pytest.raises(UserError, match=f"token ids below {VOCABULARY}, .* number of logits, found {target}"):
        TokenScorer(gemma2()).score(*asked)


LOGPROBS = np.array([-0.5, -1.25], dtype=np.float32)


@pytest.mark.parametrize(
    ("answer", "former"),
    [
        (TokenLogprobs(LOGPROBS), b"sbeval.token_logprobs"),
        (TargetLogprobs(LOGPROBS, np.array([True, False])), b"sbeval.target_logprobs"),
    ],
    ids=["token_logprobs", "target_logprobs"],
)
def test_answers_kept_under_the_modules_former_names_are_read(answer, former):
    kept = pickle.dumps(answer, protocol=2).replace(b"sbeval.scoring.requests", former)
    assert former in kept
    lines = run_code(
        "import pickle, sbeval.scoring.requests\n"
        f"answer = pickle.loads(bytes.fromhex({kept.hex()!r}))\n"
        "print(float(answer), answer.logprobs.tolist())"
    )
    assert lines == [f"{float(answer)} {LOGPROBS.tolist()}"]


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
def test_log_probabilities_and_greedy_tokens_equal_pytorch(rows, vocabulary, dtype, scale, aligned, seed):
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


def test_the_first_of_equal_logits_is_the_most_probable_token():
    logits = torch.zeros(3, 5000, device=DEVICE, dtype=torch.bfloat16)
    logits[:, 7] = logits[:, 4500] = 1.0
    _, greedy = kernel_target_logprobs(logits, torch.tensor([7, 4500, 0], device=DEVICE))
    assert greedy.tolist() == [True, False, False]


@pytest.mark.parametrize("place", [60, 4200])
@pytest.mark.parametrize("target", [60, 61, 8999])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_finite_number(value, target, place):
    logits = torch.zeros(1, 9008, device=DEVICE)
    logits[0, place] = value
    logprobs, _ = kernel_target_logprobs(logits, torch.tensor([target], device=DEVICE))
    assert not torch.isfinite(logprobs).any()


@pytest.mark.parametrize("before", [0, 4095, 4096, 4100])
def test_an_equal_logit_before_the_target_is_the_most_probable_token_instead(before):
    logits = torch.zeros(2, 9008, device=DEVICE)
    logits[:, 4101] = 1.0
    logits[1, before] = 1.0
    _, greedy = kernel_target_logprobs(logits, torch.tensor([4101, 4101], device=DEVICE))
    assert greedy.tolist() == [True, False]


@pytest.mark.parametrize("target", [-1, 100, 5000])
def test_a_target_beyond_the_row_gives_no_finite_number(target):
    logits = torch.zeros(2, 100, device=DEVICE)
    logprobs, greedy = kernel_target_logprobs(logits, torch.tensor([target, 3], device=DEVICE))
    assert (torch.isfinite(logprobs).tolist(), greedy.tolist()) == ([False, True], [False, False])


def test_a_row_where_everything_but_the_target_is_impossible():
    logits = torch.full((1, 9000), -torch.inf, device=DEVICE)
    logits[0, 8000] = -3.0
    logprobs, greedy = kernel_target_logprobs(logits, torch.tensor([8000], device=DEVICE))
    assert (logprobs.tolist(), greedy.tolist()) == ([0.0], [True])
