"""A model thinks up to a budget, is then made to answer, and its answer is scored without the thinking."""

import pickle
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sbeval.errors import UserError
from sbeval.model_adapters.generate.texts import answer_text
from sbeval.model_adapters.generate.thinking import Thinking
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.scoring.requests import Answer
from tests.model_adapters.small import LINES, instances, load_lm, tiny_tokenizer

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
def test_answers_follow_a_thinking_that_ended_or_was_cut(name, prefix, checkpoint, caplog):
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
        begun = encode("\n\n" * bool(ends and prefix) + prefix)
        before = plain.tok_encode(prompt) + written + ([] if ends else closing) + begun
        assert len(before) <= len(plain.tok_encode(prompt)) + BUDGET + len(encode(prefix))
        expected = plain.tokenizer.decode(continued(plain, before, ANSWER), skip_special_tokens=True)
        assert answer == expected.split(end)[-1].lstrip()
        assert isinstance(answer, Answer)
        assert pickle.loads(pickle.dumps(answer)).facts == answer.facts
        assert answer.facts["thinking_cut"] == known["thinking_cut"] == (not ends)
        assert (known["thinking_tokens"], known["thinking_stopped"]) == (len(written), False)
        cuts.append(not ends)
    assert cuts[0] is False
    record = lm.get_model_info()["sbeval"]
    assert (record["generated"]["answers"], record["generated"]["thinking_cut"]) == (3, sum(cuts))
    assert record["thinking_tokens"] == BUDGET
    assert (f"{sum(cuts)} of 3 answers were requested before the model had ended" in caplog.text) == any(cuts)


def test_a_text_that_ends_without_an_end_of_the_thinking_is_counted_apart(checkpoint, caplog):
    lm = load_lm(checkpoint("llama"), thinking_tokens=BUDGET, think_end_token="</x>")
    (first,) = continued(lm, lm.tok_encode(PROMPTS[0]), 1)
    lm.session.thinking.end_tokens.add(first)  # type: ignore[union-attr, attr-defined]
    lm.model.generation_config.eos_token_id = sorted(lm.session.thinking.end_tokens)  # type: ignore[union-attr]
    _, facts = asked(lm)
    assert (facts[0]["thinking_cut"], facts[0]["thinking_stopped"]) == (False, True)
    counts = lm.get_model_info()["sbeval"]["generated"]
    assert counts["thinking_stopped"] == sum(known["thinking_stopped"] for known in facts) >= 1
    assert "of 3 answers were requested again because the model ended its text" in caplog.text


def test_answers_of_a_response_cache_are_counted_and_logged_as_those_generated(checkpoint, tmp_path):
    seen = []
    for _ in range(2):
        lm = load_lm(checkpoint("llama"), thinking_tokens=BUDGET, think_end_token="</x>")
        requests = instances("generate_until", [(p, {"until": [], "max_gen_toks": ANSWER}) for p in PROMPTS])
        cached = CachingLM(lm, str(tmp_path / "cache.db"))
        known = len(cached.dbdict)
        answers = cached.generate_until(requests[: 2 + len(seen)])
        assert len(cached.dbdict) == known + 2 - len(seen)
        cached.dbdict.close()
        seen.append((lm.get_model_info()["sbeval"]["generated"], answers[:2], [r.args for r in requests[:2]]))
    assert seen[0][1:] == seen[1][1:]
    assert seen[0][2][0][-1]["thinking_text"]
    assert (seen[0][0]["answers"], seen[1][0]["answers"]) == (2, 3)
    assert 0 < seen[0][0]["thinking_tokens"] < seen[1][0]["thinking_tokens"]


def byte_tokenizer(*merges: tuple[str, str], spaces: bool = False) -> Any:
    """Bytes and what is merged of them; with `spaces` SentencePiece's, which begins every text with one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: place for place, text in enumerate([*letters, *map("".join, merges), "</s>", "\u2581", "\n"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    if spaces:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", clean_up_tokenization_spaces=False)


MERGED = byte_tokenizer(("\u010a", "\u010a"), (">", "\u010a\u010a"))


@pytest.mark.parametrize(
    ("tokenizer", "written", "beginning", "until", "text"),
    [
        (MERGED, "Ah.</t>\n\nBob", "", [], "Ah.</t>\n\n"),
        (MERGED, "Ah.</t>\n\nBob", "It is", ["\n"], "Ah.</t>\n\nIt is"),
        (MERGED, "Ah.</t>", "", [], "Ah.</t>"),
        (MERGED, "Ah.</t>", "", ["\n"], "Ah.</t>\n\n"),
        (MERGED, "Ah.</t>", "It is", [], "Ah.</t>\n\nIt is"),
        (MERGED, "Ah.", " It is", [], "Ah.\n</t>\n\n It is"),
        (byte_tokenizer(spaces=True), "Ah.</t>", "It is", [], "Ah.</t>\n\nIt is"),
        (byte_tokenizer(spaces=True), "Ah.", "It is", [], "Ah.\n</t>\n\nIt is"),
    ],
)
def test_between_thinking_and_answer_stands_what_the_model_would_write(tokenizer, written, beginning, until, text):
    opened: Any = SimpleNamespace(tokenizer=tokenizer, think_end_token="</t>", end_token_ids=[])
    ids = tokenizer.encode(written, add_special_tokens=False)
    assert tokenizer.decode(Thinking.of(opened, 60).ended(ids, beginning, until)[1]) == text


def test_an_end_that_is_a_special_token_is_not_left_out_before_the_answer_is_read(checkpoint):
    end = tiny_tokenizer(adds_bos=False).eos_token
    lm = load_lm(checkpoint("llama"), thinking_tokens=BUDGET, think_end_token=end)
    a, b = lm.tok_encode("Now")[-1], lm.tok_encode("better")[-1]
    answer = answer_text(lm.tokenizer, [a, lm.tokenizer.eos_token_id, b], [], lm.think_end_token)
    assert answer == lm.tokenizer.decode([b]).lstrip()


def begun_by_a_template(lm: StickBreakingLM) -> Instance:
    lm.tokenizer.chat_template = "{{ messages[0].content + messages[1].content }}{{ '>' if add_generation_prompt }}"
    history = [{"role": "user", "content": "Beautiful"}, {"role": "assistant", "content": " is"}]
    text = lm.apply_chat_template(history, add_generation_prompt=False)
    return instances("generate_until", [(text, {"until": [], "max_gen_toks": 4})])[0]


def begun_by_a_task(key: str, lm: StickBreakingLM) -> Instance:
    asked = instances("generate_until", [("Beautiful is", {"until": [], "max_gen_toks": 4})])[0]
    asked.doc = {key: " is"}
    return asked


OF_TASKS = [partial(begun_by_a_task, key) for key in ("answer_prefix", "gen_prefix")]  # our own, and others'


@pytest.mark.parametrize("made", [begun_by_a_template, *OF_TASKS])
def test_answers_that_the_prompt_begins_are_not_thought_about(made, checkpoint):
    lm = load_lm(checkpoint("llama"), thinking_tokens=BUDGET, think_end_token="</x>")
    with pytest.raises(
        UserError, match=r"that the prompt has already begun, as prompts do in .*: leave thinking_tokens out for them"
    ):
        lm.generate_until([made(lm)])
    plain = load_lm(checkpoint("llama"))
    assert len(plain.generate_until([made(plain)])) == 1


def test_scores_behind_prompts_to_think_are_warned_of(checkpoint, caplog):
    lm = load_lm(checkpoint("llama"), thinking_tokens=BUDGET, think_end_token="</x>")
    lm.tokenizer.chat_template = "{{ messages[0].content }}"
    lm.apply_chat_template([{"role": "user", "content": "Beautiful"}])
    lm.loglikelihood(instances("loglikelihood", [("Beautiful", " is")]))
    assert "scored directly after prompts that tell the model to think" in caplog.text


@pytest.mark.parametrize(("given", "found"), [({}, None), ({"thinking_tokens": BUDGET}, BUDGET)])
def test_tasks_of_other_budgets_are_refused(given, found, checkpoint):
    setting = {"until": [], "max_gen_toks": 4, "answer_prefix": "", "thinking_tokens": 60}
    lm = load_lm(checkpoint("llama"), **given, **({"think_end_token": "</x>"} if given else {}))
    with pytest.raises(UserError, match=f"metadata has thinking_tokens=60, but the model has {found}: set"):
        lm.generate_until(instances("generate_until", [("Beautiful", setting)]))


def test_cut_answers_are_said_of_chats_alone(checkpoint, caplog):
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
        ({"enable_thinking": False}, "thinking_tokens does not work with enable_thinking=False: leave one of them out"),
        ({"think_end_token": None}, "the text that ends the model's thinking, but none of </think>, "),
        (
            {"thinking_tokens": 4},
            r"thinking_tokens above \d+, the number of tokens that its end marker </x> takes, found 4",
        ),
        ({"thinking_tokens": 0}, "thinking_tokens to be a positive number of tokens, found 0"),
        ({"max_length": BUDGET}, f"max_gen_toks, thinking_tokens={BUDGET} to be less than max_length={BUDGET}"),
        ({"max_length": 40, "truncation": "error"}, f"prompts, thinking_tokens={BUDGET} and the tokens to generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_thinking_without_room_or_end_is_named(options, message, checkpoint):
    with pytest.raises(UserError, match=message):
        asked(load_lm(checkpoint("llama"), **{"thinking_tokens": BUDGET, "think_end_token": "</x>", **options}))
