"""Tokens that a tokenizer's template adds to a text: a prefix stands before a prompt, a suffix not between it and what
follows.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from ruler_problems import make_tokenizer
from sqlitedict import SqliteDict
from tokenizers import processors

from sbeval.corpora.tokenizers import AddedTokens, added_tokens, adds_bos
from sbeval.errors import UserError
from sbeval.model_adapters.backend import Backend
from sbeval.model_adapters.encoding import encode_prompts
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.record import STAMP_KEY, check_cache, run_settings
from sbeval.model_adapters.session import Session
from sbeval.tasks.tokens import TokenCounter
from tests.model_adapters.small import (
    LINES,
    generated,
    instances,
    likelihoods,
    load_lm,
    t5,
    tiny_tokenizer,
)

SETTING = {"until": [], "max_gen_toks": 6, "do_sample": False}
VOCABULARY = len(tiny_tokenizer(adds_bos=False))
TEMPLATES: dict[str, tuple[list[int], list[int]]] = {
    "adds nothing": ([], []),
    "BOS": ([0], []),
    "BOS and EOS": ([0], [1]),
    "EOS alone": ([], [1]),
    "EOS before": ([1], []),
    "another prefix": ([2], [1]),
    "several": ([2, 0], [1, 2]),
    "ordinary tokens": ([40, 41], [42]),
}


def templated(tokenizer: Any, prefix: Sequence[int], suffix: Sequence[int]) -> Any:
    """Has a tokenizer add tokens to every text."""
    special = {name: id for id in (*prefix, *suffix) for name in [f"[{id}]"]}
    pieces = [*(f"[{id}]" for id in prefix), "$A", *(f"[{id}]" for id in suffix)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(pieces), special_tokens=[*special.items()]
    )
    return tokenizer


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> StickBreakingLM:
    import transformers
    from corpus_problems import sharpened

    folder = tmp_path_factory.mktemp("added tokens")
    tokenizer = tiny_tokenizer(adds_bos=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 2
    sharpened(transformers.LlamaForCausalLM(config), 8.0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_lm(folder, batch_size=2)


def score(model: Any, before: Sequence[int], targets: Sequence[int]) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*before, *targets]]), use_cache=False).logits[0].double()
    rows = logits.log_softmax(-1)[len(before) - 1 : -1]
    return float(rows.gather(1, torch.tensor(targets)[:, None]).sum())


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            row.append(int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
        if row[-1] == 1:
            break
    return row[len(prompt) :]


def set_add_bos_token(lm: StickBreakingLM, add_bos_token: bool | None) -> None:
    """Makes a loaded model one that was loaded with this argument."""
    assert lm.session is not None
    lm.add_bos_token = add_bos_token
    lm.opened = dataclasses.replace(lm.opened, add_bos_token=add_bos_token)
    lm.session = dataclasses.replace(lm.session, opened=lm.opened)


ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=3)


@given(
    prefix=ids,
    suffix=ids,
    context=st.sampled_from(LINES),
    continuation=st.sampled_from([f" {line}" for line in LINES]),
    add_bos_token=st.sampled_from([None, True, False]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scores_and_answers_follow_the_prefix_and_the_prompt_alone(
    lm: StickBreakingLM,
    prefix: list[int],
    suffix: list[int],
    context: str,
    continuation: str,
    add_bos_token: bool | None,
) -> None:
    tokenizer = templated(lm.tokenizer, prefix, suffix)
    set_add_bos_token(lm, add_bos_token)
    bare, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (context, context + continuation))
    before = [] if add_bos_token is False else prefix
    assert added_tokens(tokenizer) == AddedTokens(tuple(prefix), tuple(suffix))

    assert likelihoods(lm, [(context, continuation)]) == pytest.approx(
        [score(lm.model, [*before, *bare], whole[len(bare) :])], rel=1e-5, abs=1e-5
    )
    answer = tokenizer.decode(greedy(lm.model, [*before, *bare], 6), skip_special_tokens=True)
    assert generated(lm, [(context, SETTING)]) == [answer]

    counter = TokenCounter(tokenizer, special_tokens=add_bos_token is not False)
    assert counter.count([context]).tolist() == [len(before) + len(bare)]
    assert counter.encode([context], special_tokens=True) == [[*before, *bare]]
    assert counter.encode_with_offsets(context)[0].tolist() == [*before, *bare]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_keeping_the_suffix_gives_the_numbers_of_hf(lm: StickBreakingLM, template: tuple[list[int], list[int]]) -> None:
    folder = lm.pretrained
    hf, sb = (
        kind(
            folder,
            tokenizer=templated(tiny_tokenizer(adds_bos=False), *template),
            device="cpu",
            dtype="float32",
            **more,
        )
        for kind, more in ((HFLM, {}), (StickBreakingLM, {"template_suffix": "keep"}))
    )
    pairs = [(LINES[0], f" {line}") for line in LINES[1:4]] + [("", LINES[2])]
    assert likelihoods(sb, pairs) == pytest.approx(likelihoods(hf, pairs), abs=1e-4)
    asked = [(line, SETTING) for line in LINES[:3]]
    assert generated(sb, asked) == generated(hf, asked)
    texts = [(line,) for line in LINES[:3]]
    rolling = [
        each.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True) for each in (sb, hf)
    ]
    assert rolling[0] == pytest.approx(rolling[1], abs=1e-4)
    (tokens,) = encode_prompts(sb.opened, [LINES[0]], quiet=True)
    assert TokenCounter(sb.tokenizer, keeps_suffix=True).count([LINES[0]]).tolist() == [len(tokens)]


def test_a_text_that_holds_its_special_tokens_is_read_as_it_is(lm: StickBreakingLM) -> None:
    tokenizer = templated(lm.tokenizer, [0], [1])
    set_add_bos_token(lm, None)
    chat = "<s>Now is better than never.</s>"
    assert encode_prompts(lm.opened, [chat, "never."], quiet=True) == [
        tokenizer.encode(chat, add_special_tokens=False),
        [0, *tokenizer.encode("never.", add_special_tokens=False)],
    ]
    assert TokenCounter(tokenizer).encode([chat, "never."], special_tokens=True) == encode_prompts(
        lm.opened, [chat, "never."], quiet=True
    )
    tokenizer = templated(lm.tokenizer, [2, 0], [1])
    chat = "<pad><s>Now is better than never."
    assert encode_prompts(lm.opened, [chat], quiet=True) == [tokenizer.encode(chat, add_special_tokens=False)]


def test_a_context_of_white_space_is_scored_as_none_at_all(lm: StickBreakingLM) -> None:
    set_add_bos_token(lm, None)
    for template in TEMPLATES["adds nothing"], TEMPLATES["EOS alone"]:
        tokenizer = templated(lm.tokenizer, *template)
        targets = tokenizer.encode("  never", add_special_tokens=False)
        found = likelihoods(lm, [("  ", "never"), ("", "  never")])
        assert found == pytest.approx([score(lm.model, [0], targets)] * 2, rel=1e-5)


def test_a_suffix_alone_is_no_bos() -> None:
    tokenizer = templated(tiny_tokenizer(adds_bos=False), [], [1])
    tokenizer.bos_token = tokenizer.eos_token
    assert not adds_bos(tokenizer)
    assert adds_bos(templated(tokenizer, [1], []))


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (([], []), {}, None),
        (([0], [1]), {"add_bos_token": False}, None),
        (([0], []), {}, "adds <s> before every text; loglikelihood_rolling scores <s>"),
        (([0], [1]), {}, "</s> is dropped behind prompts and contexts"),
        (([0], [1]), {}, "loglikelihood_rolling scores <s> and </s> with every text, as lm-eval does"),
        (([], [1]), {"template_suffix": "keep"}, "as in hf, </s> stands between a prompt and its answer"),
    ],
)
def test_the_record_and_the_log_say_what_the_tokenizer_adds(
    lm: StickBreakingLM,
    caplog: pytest.LogCaptureFixture,
    template: tuple[list[int], list[int]],
    options: dict[str, Any],
    said: str | None,
) -> None:
    with caplog.at_level("INFO"):
        sb = load_lm(lm.pretrained, tokenizer=templated(tiny_tokenizer(adds_bos=False), *template), **options)
    added = sb.get_model_info()["sbeval"]["added_tokens"]
    if said is None:
        assert added is None
        assert "the tokenizer adds" not in caplog.text
        return
    assert said in added["sentence"]
    names = {0: "<s>", 1: "</s>"}
    assert [added["prefix"], added["suffix"]] == [[names[id] for id in ids] for ids in template]
    assert caplog.text.count(added["sentence"]) == 1


def test_an_encoder_decoder_model_reads_the_suffix_as_hf_does(tmp_path: Path) -> None:
    folder = t5(tmp_path)
    templated(tiny_tokenizer(adds_bos=False), [], [1]).save_pretrained(folder)
    hf, sb = (kind(str(folder), device="cpu", dtype="float32") for kind in (HFLM, StickBreakingLM))
    pairs = [(LINES[0], f" {line}") for line in LINES[1:4]]
    assert likelihoods(sb, pairs) == pytest.approx(likelihoods(hf, pairs), abs=1e-5)
    assert generated(sb, [(LINES[0], SETTING)]) == generated(hf, [(LINES[0], SETTING)])
    assert "as in hf" in sb.get_model_info()["sbeval"]["added_tokens"]["sentence"]
    with pytest.raises(UserError, match="template_suffix"):
        load_lm(folder, template_suffix="keep")


def test_the_option_is_one_of_two() -> None:
    with pytest.raises(UserError, match="template_suffix"):
        AdapterOptions.pop({"template_suffix": "both"})


@pytest.mark.parametrize("kind", ["byte_level_bpe", "sentencepiece", "character"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_what_a_tokenizer_adds_is_found_for_every_kind(kind: str, template: tuple[list[int], list[int]]) -> None:
    tokenizer = templated(make_tokenizer(kind, [*LINES]), *template)
    assert added_tokens(tokenizer) == AddedTokens(*map(tuple, template))


def test_other_models_of_lm_eval_record_what_their_tokenizer_adds(lm: StickBreakingLM) -> None:
    tokenizer = templated(tiny_tokenizer(adds_bos=False), [0], [1])
    backend = Backend.of(HFLM(lm.pretrained, tokenizer=tokenizer, device="cpu", dtype="float32"))
    added = backend.record().to_json()["added_tokens"]
    assert (added["prefix"], added["suffix"]) == (["<s>"], ["</s>"])
    assert "hf decides what it adds to prompts of text" in added["sentence"]


def session_with(lm: StickBreakingLM, suffix: Sequence[int], template_suffix: str = "drop") -> Session:
    assert lm.session is not None
    tokenizer = templated(tiny_tokenizer(adds_bos=False), [0], suffix)
    options = lm.opened.options.model_copy(update={"template_suffix": template_suffix})
    return dataclasses.replace(
        lm.session, opened=dataclasses.replace(lm.opened, tokenizer=tokenizer, options=options, source=None)
    )


def test_a_response_cache_holds_answers_of_one_template_suffix(lm: StickBreakingLM) -> None:
    stamped = {name: run_settings(session_with(lm, [1], name))["template_suffix"] for name in ("drop", "keep")}
    assert stamped == {"drop": "drop", "keep": "keep"}
    assert run_settings(session_with(lm, [], "keep")) == run_settings(session_with(lm, []))  # the same answers


def test_a_response_cache_without_template_suffix_holds_answers_with_the_suffix(
    lm: StickBreakingLM, tmp_path: Path
) -> None:
    def earlier(suffix: Sequence[int]) -> SqliteDict:
        database = SqliteDict(str(tmp_path / f"{len(suffix)}.db"), autocommit=True)
        check_cache(database, session_with(lm, suffix))
        settings = database[STAMP_KEY]
        del settings["template_suffix"]
        database[STAMP_KEY] = settings
        return database

    with earlier([1]) as database:
        check_cache(database, session_with(lm, [1], "keep"))
        with pytest.raises(UserError, match=r"found one made with template_suffix='keep' instead of 'drop': use"):
            check_cache(database, session_with(lm, [1], "drop"))
    with earlier([]) as database:
        for template_suffix in ("drop", "keep"):
            check_cache(database, session_with(lm, [], template_suffix))
