"""Ways of running a model in which it would answer wrongly are found before its first answer, and not used."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sbeval.errors import UserError
from sbeval.model_adapters.batching import BatchLimits
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.self_test import outcome as names
from sbeval.model_adapters.self_test import testing
from sbeval.model_adapters.session import Session
from tests.measures import families
from tests.model_adapters.small import cache_argument, copied, likelihoods, load_lm

Forward = Callable[..., Any]
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))


def in_the_forward(fault: Callable[[Forward, Any, dict[str, Any]], Any]) -> Plant:
    """Plants a fault in every Llama: it is given the forward of the model's body, the body, and the arguments."""
    own = transformers.LlamaModel.forward
    return lambda patch: patch.setattr(transformers.LlamaModel, "forward", lambda self, **kw: fault(own, self, kw))


def moved(output: Any, by: Tensor | float) -> Any:
    output.last_hidden_state = output.last_hidden_state + by
    return output


def held(given: dict[str, Any]) -> int:
    cache = cache_argument(given)
    return 0 if cache is None else cache.layers[0].get_seq_length()


def sees_later_tokens(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    output = own(body, **given)
    return moved(output, output.last_hidden_state.mean(1, keepdim=True))


def one_token_wrong(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    wrong = held(given) > 0 and given["input_ids"].shape[1] == 1
    output = own(body, **given)
    return moved(output, output.last_hidden_state.roll(1, -1)) if wrong else output


def several_tokens_wrong(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    wrong = held(given) > 0 and given["input_ids"].shape[1] > 1
    output = own(body, **given)
    return moved(output, output.last_hidden_state.roll(1, -1)) if wrong else output


def padding_is_read(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    return own(body, **{**given, "attention_mask": None, "position_ids": None})


def padding_reaches_back(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    output = own(body, **given)
    ends = given["input_ids"][:, -1:] == 0  # what scoring pads with
    return moved(output, ends[..., None] * output.last_hidden_state.roll(1, -1))


def padding_reaches_back_in_long_rows(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    output, ids = own(body, **given), given["input_ids"]
    ends = (ids[:, -1:] == 0) & ((ids[:, :20] != 0).all(1, keepdim=True))
    return moved(output, ends[..., None] * output.last_hidden_state.roll(1, -1))


def rows_mix(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    output = own(body, **given)
    return moved(output, 0.3 * (output.last_hidden_state.roll(1, 0) - output.last_hidden_state))


def six_rows_mix(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    return rows_mix(own, body, given) if len(given["input_ids"]) >= 6 else own(body, **given)


def late_tokens_see_later_ones(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    output, length = own(body, **given), given["input_ids"].shape[1]
    later = (torch.arange(length) >= 14) & (length > 16)
    return moved(output, later[:, None] * output.last_hidden_state.mean(1, keepdim=True))


def rows_differ_by_their_place(own: Forward, body: Any, given: dict[str, Any]) -> Any:
    output = own(body, **given)
    return moved(output, torch.arange(len(output.last_hidden_state))[:, None, None] * output.last_hidden_state)


def attention_of_sdpa_sees_all(patch: pytest.MonkeyPatch) -> None:
    def attend(module: Any, query: Tensor, *args: Any, **kw: Any) -> Any:
        return sdpa_attention_forward(module, query, *args[:2], None, **{**kw, "is_causal": False})

    patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attend)


def cache_counts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformers.DynamicCache, "get_seq_length", lambda self, layer_idx=0: 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A planted fault, the checks that find it, and what is done about it."""

    plant: Plant
    failed: set[str]
    scoring: str = names.TOGETHER
    generation: str = names.TOGETHER
    attention: str | None = None


ROWS = {names.ROWS, names.ROWS_GENERATED}
CASES = {
    "sees later tokens": Case(
        plant=in_the_forward(sees_later_tokens),
        failed={names.LATER_TOKENS, names.ONE},
        **{"scoring": names.REFUSED, "generation": names.WITHOUT_CACHE},
    ),
    "one token": Case(plant=in_the_forward(one_token_wrong), failed={names.ONE}, generation=names.WITHOUT_CACHE),
    "several tokens": Case(plant=in_the_forward(several_tokens_wrong), failed={names.SEVERAL}),
    "left padding": Case(
        plant=in_the_forward(padding_is_read), failed={names.LEFT_PADDING}, generation=names.EQUAL_LENGTHS
    ),
    "right padding": Case(
        plant=in_the_forward(padding_reaches_back), failed={names.RIGHT_PADDING}, scoring=names.EQUAL_LENGTHS
    ),
    "rows": Case(plant=in_the_forward(rows_mix), failed=ROWS, scoring=names.ALONE, generation=names.ALONE),
    "rows of six or more": Case(
        plant=in_the_forward(six_rows_mix), failed=ROWS, scoring=names.ALONE, generation=names.ALONE
    ),
    "later tokens, from the fifteenth on": Case(
        plant=in_the_forward(late_tokens_see_later_ones),
        failed={names.LATER_TOKENS},
        scoring=names.REFUSED,
        generation=names.WITHOUT_CACHE,
    ),
    "place of a row": Case(
        plant=in_the_forward(rows_differ_by_their_place), failed=ROWS, scoring=names.ALONE, generation=names.ALONE
    ),
    "sdpa": Case(plant=attention_of_sdpa_sees_all, failed={names.ATTENTION}, attention="eager"),
    "length of the cache": Case(
        plant=cache_counts_nothing, failed={names.LENGTH, names.SEVERAL}, generation=names.EQUAL_LENGTHS
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_and_avoided(name, checkpoint, monkeypatch):
    case, folder = CASES[name], checkpoint("llama")
    case.plant(monkeypatch)
    lm = load_lm(folder, batch_size=8)
    found = lm.session.self_test
    assert case.failed <= found.failed.keys(), str(found)
    assert (found.scoring, found.generation, found.attention) == (case.scoring, case.generation, case.attention)
    assert families.answers_of(lm) == families.whole_answers(lm, families.PROMPTS)
    if case.scoring == names.REFUSED:
        with pytest.raises(UserError, match="earlier tokens do not see later ones: 0"):
            likelihoods(lm, families.PAIRS)
    else:
        assert likelihoods(lm, families.PAIRS) == pytest.approx(families.whole_scores(lm, families.PAIRS), abs=1e-4)
    unaware = load_lm(folder, batch_size=8, self_test=False)
    right = families.answers_of(unaware) == families.whole_answers(lm, families.PROMPTS)
    assert not right or likelihoods(unaware, families.PAIRS) != pytest.approx(
        families.whole_scores(lm, families.PAIRS), abs=1e-4
    )


def test_padding_that_long_rows_alone_show_is_found(checkpoint, monkeypatch):
    in_the_forward(padding_reaches_back_in_long_rows)(monkeypatch)
    lm = load_lm(checkpoint("llama"), batch_size=8)
    assert lm.session is not None
    assert lm.session.self_test.failed.keys() == {names.RIGHT_PADDING}
    assert lm.session.batches.same_length


def test_a_cache_that_counts_nothing_reads_no_padding_where_rounding_hides_the_fault(tmp_path):
    families.save_tiny("minimax", tmp_path)
    lm = load_lm(tmp_path, batch_size=8, dtype="bfloat16")
    assert lm.session is not None
    assert (names.LEFT_PADDING in lm.session.self_test.failed, lm.session.self_test.generation) == (
        False,
        names.EQUAL_LENGTHS,
    )


@pytest.mark.parametrize("seed", [107, 205])
def test_an_expert_that_rounding_changes_is_no_fault(seed, tmp_path):
    families.save_tiny("mixtral", tmp_path, seed=seed, num_local_experts=64)
    lm = load_lm(tmp_path, batch_size=8, dtype="float16")
    assert lm.session is not None
    assert lm.session.self_test.failed == {}


def test_a_sound_model_is_run_as_before(checkpoint):
    lm = load_lm(checkpoint("qwen3"), batch_size=8)
    assert (lm.session.self_test.failed, lm.session.self_test.untested) == ({}, None)
    assert lm.session.batches == lm.session.generation_batches == BatchLimits(max_rows=8)
    assert lm.session.own_batches.max_rows is None


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in families.OF_MAKE_TEST else pytest.mark.exhaustive)
        for family in families.FAMILIES
    ],
)
def test_a_family_answers_in_a_batch_as_whole_texts_do(family, tmp_path):
    if find_spec("fla") and family in ("qwen3_next", "mamba"):
        pytest.skip("flash-linear-attention's kernels, which transformers takes on any device, need a GPU")
    failed = families.FAILED.get(family, set())
    families.save_tiny(family, tmp_path)
    lm, alone = load_lm(tmp_path, batch_size=8), load_lm(tmp_path, batch_size=1)
    assert lm.session.self_test.failed.keys() == failed, str(lm.session.self_test)
    expected = families.whole_answers(lm, families.PROMPTS, 32)
    assert families.answers_of(lm, 32) == families.answers_of(alone, 32) == expected
    assert likelihoods(lm, families.PAIRS) == pytest.approx(families.whole_scores(lm, families.PAIRS), abs=1e-3)
    if names.LEFT_PADDING in failed:
        unaware = load_lm(tmp_path, batch_size=8, self_test=False)
        assert families.answers_of(unaware, 32) != expected, "transformers has mended it"


def test_what_was_found_is_kept_until_the_checkpoint_or_a_version_is_another(checkpoint, monkeypatch, caplog):
    tested: list[str] = []
    own = testing._decided
    monkeypatch.setattr(testing, "_decided", lambda session: tested.append(session.opened.source) or own(session))
    folder = checkpoint("qwen3")
    with caplog.at_level("INFO"):
        first, second = (load_lm(folder) for _ in range(2))
    assert caplog.text.count("self-test: Qwen3ForCausalLM has the logits of whole texts") == 2
    assert first.session.self_test == second.session.self_test
    assert len(tested) == 1
    load_lm(folder, dtype="float64")
    load_lm(checkpoint("llama"))
    monkeypatch.setattr(testing, "_VERSION", 0)
    load_lm(folder)
    assert len(tested) == 4


def test_what_was_found_on_one_gpu_is_not_read_for_a_model_on_two(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    lm, places = load_lm(checkpoint("llama")), []
    for devices in ("cpu", "cuda:0", "cuda", "cuda:0 meta", "cuda:0 cuda:1"):
        held = list(map(torch.device, devices.split()))
        opened = dataclasses.replace(lm.opened, device=held[0])
        weights = [SimpleNamespace(device=each, dtype=torch.float32, is_floating_point=lambda: True) for each in held]
        monkeypatch.setattr(lm.model, "parameters", lambda weights=weights: iter(weights))
        places.append(testing._place(dataclasses.replace(lm.session, opened=opened)))
    assert [places.index(place) for place in places] == [0, 1, 1, 1, 4]


def test_the_record_says_what_was_found_or_that_nothing_was_tested(checkpoint):
    record, untested, own = (
        load_lm(checkpoint(name), self_test=asked).get_model_info()["sbeval"]["self_test"]
        for name, asked in (("llama", True), ("llama", False), ("rope", True))
    )
    assert record["sound"] is True
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert untested["sentence"] == "LlamaForCausalLM was not tested: self_test=false"
    assert own is None


def test_one_process_decides_for_all(checkpoint, monkeypatch):
    decided = names.Outcome(model="LlamaForCausalLM", generation=names.ALONE, attention="eager")

    def receive(outcomes: list[Any], src: int) -> None:
        outcomes[src] = decided

    lm = load_lm(checkpoint("llama"), self_test=False, batch_size=8)

    def rank(number: int) -> Session:
        options = lm.opened.options.model_copy(update={"self_test": True})
        opened = dataclasses.replace(lm.opened, options=options, rank=number, world_size=2)
        return dataclasses.replace(lm.session, opened=opened)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", receive)
    session = testing.tested(rank(1))
    assert (session.self_test, session.generation_batches.max_rows) == (decided, 1)
    assert lm.model.config._attn_implementation == "eager"
    sent: list[Any] = []
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda outcomes, src: sent.extend(outcomes))
    monkeypatch.setattr(testing, "_outcome", lambda *_: (_ for _ in ()).throw(UserError("another attention")))
    with pytest.raises(UserError, match="another attention"):
        testing.tested(rank(0))
    assert [str(refusal) for refusal in sent] == ["another attention"]


def test_a_model_that_cannot_be_tested_is_run_as_it_is(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(testing, "_decided", lambda *_: (_ for _ in ()).throw(RuntimeError("no such kernel")))
    lm = load_lm(checkpoint("gpt2"))
    assert "GPT2LMHeadModel was not tested: no such kernel" in caplog.text
    assert lm.session.generation_batches == lm.session.batches


def test_what_a_generation_config_says_is_no_fault(checkpoint, tmp_path):
    says = {"max_new_tokens": 40, "max_time": 1e-9, "stop_strings": ["e"]}
    lm = load_lm(copied(checkpoint("llama"), tmp_path, "generation_config.json", **says), batch_size=8)
    assert (lm.session.self_test.failed, lm.session.self_test.untested) == ({}, None)


@pytest.mark.parametrize("eager", [RuntimeError("no such kernel"), torch.nan])
def test_broken_eager_attention_is_unused(eager, checkpoint, monkeypatch):
    def attend(module: Any, query: Tensor, *args: Any, **kw: Any) -> Any:
        if isinstance(eager, Exception):
            raise eager
        return torch.full_like(query.transpose(1, 2), eager), None

    monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", attend)
    lm = load_lm(checkpoint("llama"))
    assert (lm.session.self_test.failed, lm.session.self_test.untested) == ({}, None)
    assert lm.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("named", "eager", "compiled", "refused"),
    [(True, False, False, True), (True, False, True, True), (True, True, False, False), (False, False, False, False)],
)
def test_a_named_attention_that_raises_where_eager_attention_runs_is_refused(
    named, eager, compiled, refused, checkpoint, monkeypatch, caplog
):
    is_compiled = torch.compile(lambda x_1: x_1 * torch.compiler.is_compiling(), backend="eager")

    def attend(*args: Any, **kw: Any) -> Any:
        if compiled and not is_compiled(torch.ones(1)):
            return sdpa_attention_forward(*args, **kw)
        raise RuntimeError("no such kernel")

    for name in ("flex_attention", "sdpa"):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, attend)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "flex_attention", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    if eager:
        monkeypatch.setattr("transformers.models.llama.modeling_llama.eager_attention_forward", attend)
    words = r"runs on \w+, found flex_attention \(no such kernel\): leave it out of --model_args, or name another\."
    with pytest.raises(UserError, match=words) if refused else contextlib.nullcontext():
        lm = load_lm(checkpoint("llama"), **({"attn_implementation": "flex_attention"} if named else {}))
        assert "was not tested: no such kernel" in caplog.text
        assert lm.model.config._attn_implementation == ("flex_attention" if named else "sdpa")


def test_flex_attention_is_compiled_once_to_be_compared_with_eager_attention(checkpoint, monkeypatch):
    is_compiled = torch.compile(lambda x_1: x_1 * torch.compiler.is_compiling(), backend="eager")
    compiled: list[tuple[bool, str]] = []

    def watched(own: Forward, body: Any, given: dict[str, Any]) -> Any:
        compiled.append((bool(is_compiled(torch.ones(1))), body.config._attn_implementation))
        return own(body, **given)

    flex = "flex_attention"
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(table, flex, table["sdpa"])
    in_the_forward(watched)(monkeypatch)
    lm = load_lm(checkpoint("llama"), attn_implementation=flex)
    assert lm.session.self_test.failed == {}
    assert [name for is_true, name in compiled if is_true] == [flex]
    assert len(compiled) > 10
    likelihoods(lm, families.PAIRS)
    assert compiled[-1] == (True, flex)


def test_a_model_that_keeps_changing_is_not_scored(checkpoint, monkeypatch):
    calls = itertools.count()
    in_the_forward(lambda own, body, given: moved(own(body, **given), torch.randn(32) * next(calls)))(monkeypatch)
    lm = load_lm(checkpoint("llama"))
    with pytest.raises(UserError, match="the same text read again: "):
        likelihoods(lm, families.PAIRS)


def test_a_process_that_runs_alone_waits_for_nobody(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: pytest.fail("waits"))
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    assert StickBreakingLM(model, tokenizer=str(checkpoint("llama")), device="cpu").session is not None


def test_a_family_that_is_not_run_or_answers_otherwise_fails(monkeypatch):
    monkeypatch.setattr("sys.argv", ["families", "lama"])
    monkeypatch.setattr("logging.disable", lambda *_: None)
    monkeypatch.setenv("SBEVAL_CACHE", "")
    with pytest.raises(SystemExit, match=r"not run, or other answers or scores.*: lama"):
        families.main()
    assert all(map(families.is_right, [("x", "yes", "yes"), ("x", "refused", "yes")]))
    assert not any(map(families.is_right, [("x", "off by 1 nats", "yes"), ("x", "yes", "3 of 5")]))
    assert {"llama", "deepseek_v32", "glm_moe_dsa"} <= families.documented()
