"""A model thinks up to a budget, is then made to answer, and its answer is scored without the thinking."""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.scoring.requests import AfterThinking
from tests.model_adapters.small import LINES, Checkpoints, instances, load_lm

PROMPTS = [LINES[0], LINES[-3], LINES[2] + "\n" + LINES[3]]
BUDGET, ANSWER = 24, 6


@torch.no_grad()
def continued(lm: StickBreakingLM, ids: Sequence[int], tokens: int) -> list[int]:
    """The most probable next tokens, each from a pass over all before it."""
    text = torch.tensor([ids])
    while text.shape[1] < len(ids) + tokens and text[0, -1] != lm.tokenizer.eos_token_id:
        text = torch.cat([text, lm.model(input_ids=text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return text[0, len(ids) :].tolist()


def asked(lm: StickBreakingLM, prefix: str = "") -> tuple[list[str], list[dict[str, Any]]]:
    setting = {"until": [], "max_gen_toks": ANSWER, **({"answer_prefix": prefix} if prefix else {})}
    requests = instances("generate_until", [(prompt, setting) for prompt in PROMPTS])
    return lm.generate_until(requests, disable_tqdm=True), [request.args[-1] for request in requests]


@pytest.mark.parametrize("prefix", ["", "The answer is"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "stickbreaking"])
def test_answers_follow_a_thinking_that_ended_or_was_cut(
    name: str, prefix: str, checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load_lm(checkpoint(name))
    thoughts = [continued(plain, plain.tok_encode(prompt), BUDGET) for prompt in PROMPTS]
    end = plain.tokenizer.decode(thoughts[0][3])  # so the first prompt's thinking ends by itself
    lm = load_lm(checkpoint(name), batch_size=4, thinking_tokens=BUDGET, think_end_token=end)
    assert lm.chat_template_args == {"enable_thinking": True}
    answers, facts = asked(lm, prefix)
    encode = lambda text: plain.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    closing = encode(f"\n{end}\n\n")
    cuts = []
    for prompt, thought, answer, known in zip(PROMPTS, thoughts, answers, facts, strict=True):
        written = thought[: BUDGET - len(closing) - 2]
        ends = [n for n in range(1, len(written) + 1) if end in plain.tokenizer.decode(written[:n])]
        written = written[: ends[0]] if ends else [token for token in written if token != plain.tokenizer.eos_token_id]
        before = plain.tok_encode(prompt) + written + (encode("\n\n") if ends else closing) + encode(prefix)
        assert len(before) <= len(plain.tok_encode(prompt)) + BUDGET + len(encode(prefix))
        expected = plain.tokenizer.decode(continued(plain, before, ANSWER), skip_special_tokens=True)
        assert answer == expected.split(end)[-1].lstrip()
        assert isinstance(answer, AfterThinking)
        assert pickle.loads(pickle.dumps(answer)).cut == answer.cut == known["thinking_cut"] == (not ends)
        assert known["thinking_tokens"] == len(written)
        cuts.append(not ends)
    assert cuts[0] is False
    record = lm.get_model_info()["sbeval"]
    assert (record["generated"]["answers"], record["generated"]["thinking_cut"]) == (3, sum(cuts))
    assert record["thinking_tokens"] == BUDGET
    assert (f"{sum(cuts)} of 3 answers were asked for before the model had ended" in caplog.text) == any(cuts)


def test_cut_answers_are_said_of_chats_alone(checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    lm = load_lm(checkpoint("llama"), batch_size=4)
    asked(lm)
    assert "were cut at their budget" not in caplog.text
    lm.tokenizer.chat_template = "{{ messages[0].content }}"
    lm.apply_chat_template([{"role": "user", "content": "Beautiful"}])
    asked(lm)
    assert "answers were cut at their budget: raise it with --gen_kwargs max_gen_toks=..., or pass" in caplog.text
    assert lm.get_model_info()["sbeval"]["generated"]["answers"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinking": False}, "enable_thinking=True beside thinking_tokens, found False: leave one of them out"),
        ({"think_end_token": None}, "end of the model's thinking beside thinking_tokens, found none of </think>, "),
        ({"thinking_tokens": 4}, r"thinking_tokens above \d+, what its end </x> takes, found 4"),
        ({"thinking_tokens": 0}, "thinking_tokens to be a positive number of tokens, found 0"),
        ({"max_length": BUDGET}, f"max_gen_toks, thinking_tokens={BUDGET} to be less than max_length={BUDGET}"),
        ({"max_length": 40, "truncation": "error"}, f"prompts, thinking_tokens={BUDGET} and the tokens to generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_thinking_without_room_or_end_is_one_sentence(
    options: dict[str, Any], message: str, checkpoint: Checkpoints
) -> None:
    with pytest.raises(UserError, match=message):
        asked(load_lm(checkpoint("llama"), **{"thinking_tokens": BUDGET, "think_end_token": "</x>", **options}))
