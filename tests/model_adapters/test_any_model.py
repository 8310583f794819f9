"""Any model of lm-eval that scores tokens answers this project's requests with the numbers of `sb`, or says why not."""

import contextlib
import importlib
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh_process
import pytest
import torch
from corpus_problems import byte_level_bpe
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import get_model
from ruler_problems import evaluated, write_labelled
from scoring_servers import LLM, Choice, CompletionsServer, completions_server, install_vllm
from transformers import AutoModelForCausalLM

from sbeval import plugin
from sbeval.errors import UserError
from sbeval.model_adapters.backend import Backend
from sbeval.tasks.perplexity import longppl
from tests.model_adapters.small import copied, english, t5

plugin.complete_imports()
PERPLEXITY = [f"sb_text_{protocol}" for protocol in ("fixed_target", "position", "rolling", "stream", "sliding")]
RECALL = ["sb_mqrar", "sb_mqrar_text", "sb_flipflop", "sb_copy_phrase", "sb_json_kv_forced", "sb_many_shot_file"]
LONG = {"context_lengths": [1000], "max_length": 1100}
CANCELLED = ("change", "gain", "stderr")  # differences of numbers a hundred times as large


@pytest.fixture
def metadata(tmp_path, monkeypatch) -> dict[str, Any]:
    """Short documents, so that windows hold targets of several, and small probes."""
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for index in range(6):
        (tmp_path / "texts" / f"{index}.txt").write_text(english()[60 * index : 60 * index + 260])
    write_labelled(tmp_path / "labelled.jsonl")
    probes = {"num_samples": 2, "pairs": [2], "phrases": 1, "phrase_words": 4, "distances": [128]}
    probes["examples_file"] = str(tmp_path / "labelled.jsonl")
    sizes = {"sb_mqrar": {"context_lengths": [20], "vocabulary": 100}, "sb_text_sliding": {"stride": 8}}
    lengths = {"context_lengths": [16, 32, 64], "max_length": 128}
    return {"data_path": str(tmp_path / "texts"), "targets_per_window": 8, **lengths, **probes, **sizes}


@pytest.fixture
def server(checkpoint) -> Iterator[CompletionsServer]:
    for package in ("tenacity", "aiohttp"):
        pytest.importorskip(package, reason="lm-eval[api] brings it")
    with completions_server(checkpoint("rope", adds_bos=True)) as running:
        yield running


def over(server: CompletionsServer, **options: Any) -> Any:
    return get_model("local-completions")(**server.arguments | options)


def numbers(lm: Any, tasks: list[str], metadata: dict[str, Any], folder: Path, **options: Any) -> Any:
    """Every metric of a run, and of every sample."""
    found = evaluated(lm, tasks, {"pretrained": str(folder)} | metadata, log_samples=True, **options)
    samples = [
        [row["resps"], {key: row[key] for key in row["metrics"]}] for name in tasks for row in found["samples"][name]
    ]
    return json.loads(json.dumps([found["results"], samples]))


def differing(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """Yields where two runs differ by more than 1e-6 of a number."""
    if isinstance(expected, dict | list):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            yield from differing(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, float):
        small = 1e-4 if any(word in path for word in CANCELLED) else 1e-7
        if "perplexity" in path and found > 0 < expected:  # an exponential of nats
            found, expected = math.log(found), math.log(expected)
        if found != pytest.approx(expected, rel=1e-6, abs=small, nan_ok=True):
            yield f"{path}: {found} instead of {expected}"
    elif found != expected:
        yield f"{path}: {found} instead of {expected}"


@pytest.mark.parametrize(
    ("architecture", "tasks"),
    [
        pytest.param("llama", PERPLEXITY, id="llama-perplexity"),
        *(
            pytest.param(architecture, tasks, id=f"{architecture}-{name}", marks=pytest.mark.exhaustive)
            for architecture, tasks, name in (
                ("llama", RECALL, "recall"),
                ("stickbreaking", PERPLEXITY, "perplexity"),
                ("stickbreaking", RECALL, "recall"),
            )
        ),
    ],
)
def test_hf_gives_the_numbers_of_sb(architecture, tasks, checkpoint, metadata):
    folder = checkpoint(architecture, adds_bos=architecture == "llama")
    metadata |= LONG if tasks is RECALL else {}
    arguments = {"pretrained": str(folder), "device": "cpu", "dtype": "float32", "batch_size": 3, "max_length": 1100}
    hf, sb = (numbers(get_model(name)(**arguments), tasks, metadata, folder) for name in ("hf", "sb"))
    assert not [*differing(hf, sb)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"num_concurrent": 3, "batch_size": 2}], ids=str)
def test_a_completions_server_gives_the_numbers_of_sb(options, server, checkpoint, metadata):
    folder = checkpoint("rope", adds_bos=True)
    tasks = [*PERPLEXITY, "sb_mqrar"]
    expected = numbers(get_model("sb")(str(folder), device="cpu", dtype="float32"), tasks, metadata, folder)
    assert not [*differing(numbers(over(server, **options), tasks, metadata, folder), expected)]


@pytest.fixture
def vllm(monkeypatch) -> tuple[type[LLM], Callable[..., Any]]:
    return install_vllm(monkeypatch), importlib.import_module("lm_eval.models.vllm_causallms").VLLM


@pytest.mark.exhaustive
def test_vllm_is_called_as_lm_eval_calls_it_and_gives_the_numbers_of_sb(vllm, checkpoint, metadata):
    folder, (engine, load) = checkpoint("rope"), vllm
    expected = numbers(get_model("sb")(str(folder), device="cpu", dtype="float32"), PERPLEXITY, metadata, folder)
    lm = load(str(folder), max_model_len=66, dtype="float32")
    assert not [*differing(numbers(lm, PERPLEXITY, metadata, folder), expected)]
    assert lm.get_model_info()["sbeval"]["backend"] == "vllm"
    engine.spoil = staticmethod(lambda output: output.prompt_token_ids.insert(0, 0))  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"Expected vllm .* the 65 tokens of a prompt, found that it puts a token of its own"
    ):
        numbers(lm, ["sb_text_stream"], metadata, folder)


def test_longppl_needs_sums_over_key_tokens_and_the_other_targets(checkpoint, metadata, monkeypatch):
    monkeypatch.setattr(longppl, "LEAST_LOGPROB_NATS", -99.0)  # which a model that knows nothing seldom exceeds
    folder, lengths = checkpoint("llama"), {"context_lengths": [8, 64]}
    arguments = {"pretrained": str(folder), "device": "cpu", "dtype": "float32"}
    metadata |= {"longppl_evaluator": str(folder), **lengths}
    hf, sb = (numbers(get_model(name)(**arguments), PERPLEXITY[:1], metadata, folder) for name in ("hf", "sb"))
    assert sb[0][PERPLEXITY[0]]["longppl_tokens@0000064,none"] > 0
    assert not [*differing(hf, sb)]


def told(choice: Choice, value: float) -> None:
    choice["token_logprobs"] = [None] + [value] * (len(choice["token_logprobs"]) - 1)


def shorter(choice: Choice) -> None:
    choice["token_logprobs"] = choice["token_logprobs"][:20]


@pytest.mark.parametrize(
    ("change", "spoil", "tells_usage", "sentence"),
    [
        (lambda prompt: prompt[-40:], None, True, "the 65 tokens of a prompt, found that it read 40, so it truncates"),
        (lambda prompt: prompt[-40:], None, False, "the 65 tokens of a prompt, found that it read 40, so it truncates"),
        (lambda prompt: prompt[1:], None, True, r"found that it drops the first, BOS \(0\): configure it"),
        (lambda prompt: prompt[1:], None, False, r"found that it drops the first, BOS \(0\)"),
        (lambda prompt: [0, *prompt], None, True, r"found that it puts a token of its own before them \('<s>'\)"),
        (lambda prompt: [0, *prompt], None, False, r"found that it puts a token of its own before them \('<s>'\)"),
        (list, shorter, True, "found log-probabilities of 19: use a server that returns all"),
        (list, lambda choice: choice.clear(), True, "found log-probabilities of 0: use a server"),
        (list, lambda choice: choice["token_logprobs"].__setitem__(9, None), True, "found log-probabilities of 64"),
        (
            list,
            lambda choice: choice["token_logprobs"].extend([-5.0] * 2),
            True,
            "of 67: use a server that generates one",
        ),
        (list, lambda choice: told(choice, 3.5), True, "found a log-probability above 0 of 3.5"),
        (list, lambda choice: choice.pop("top_logprobs"), True, "found none of the most probable tokens"),
    ],
)
def test_a_server_that_does_something_else_with_a_prompt_is_named(
    change, spoil, tells_usage, sentence, server, metadata
):
    server.change, server.spoil, server.tells_usage = change, spoil or server.spoil, tells_usage
    with pytest.raises(UserError, match=rf"Expected local-completions at http.*{sentence}.*: with --use_cache FILE"):
        numbers(over(server), ["sb_text_stream"], metadata, Path(server.arguments["tokenizer"]))


def test_a_server_that_makes_tokens_of_its_own_of_a_text_is_named(server, metadata):
    with pytest.raises(UserError, match=r"puts a token of its own before them \('<s>'\)"):
        numbers(
            over(server, tokenized_requests=False), ["sb_text_stream"], metadata, Path(server.arguments["tokenizer"])
        )


def test_another_tokenizer_than_the_server_s_is_named(server, metadata, tmp_path):
    byte_level_bpe(["of other text"], 290, adds_bos=True, pad_token="<pad>").save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"makes \d+ tokens of a text where the server counts \d+: name"):
        numbers(over(server, tokenizer=str(tmp_path / "other")), ["sb_text_stream"], metadata, tmp_path / "other")
    assert len(server.asked) == 1


@pytest.mark.exhaustive
def test_a_run_that_failed_goes_on_after_what_was_answered(server, metadata, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lm_eval.sbeval")
    folder, tasks = Path(server.arguments["tokenizer"]), ["sb_text_stream", "sb_text_position"]
    expected = numbers(over(server), tasks, metadata, folder)
    planned = len(server.asked)
    assert f"windows need {planned} requests with {sum(map(len, server.asked)):,} tokens in total" in caplog.text
    server.asked.clear()
    server.fails_at = (7,)
    with pytest.raises(
        UserError, match=rf"HTTPError \(500.*: 6 of {planned} answers are kept by --use_cache; the same"
    ):
        numbers(over(server), tasks, metadata, folder, use_cache=str(tmp_path / "answers"))
    found = numbers(over(server, timeout=900), tasks, metadata, folder, use_cache=str(tmp_path / "answers"))
    assert len(server.asked) == planned + 1
    assert not [*differing(found, expected)]
    numbers(over(server, model="another"), tasks, metadata, folder, use_cache=str(tmp_path / "answers"))
    assert len(server.asked) == 2 * planned + 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [float("nan"), pytest.param(3.5, marks=pytest.mark.exhaustive)])
def test_what_is_no_log_probability_is_asked_for_again(value, server, metadata, tmp_path):
    folder, kept = Path(server.arguments["tokenizer"]), {"use_cache": str(tmp_path / "answers")}
    expected, server.spoil = numbers(over(server), ["sb_text_stream"], metadata, folder), lambda of: told(of, value)
    with contextlib.suppress(UserError):
        numbers(over(server), ["sb_text_stream"], metadata, folder, **kept)
    server.spoil = lambda choice: None
    for asks in (True, False):
        server.asked.clear()
        assert not [*differing(numbers(over(server), ["sb_text_stream"], metadata, folder, **kept), expected)]
        assert bool(server.asked) is asks


@pytest.mark.exhaustive
def test_one_cache_serves_checkpoints_and_settings_that_answer_differently(checkpoint, metadata, tmp_path):
    made = []
    for name, dtype in (("rope", "float32"), ("llama", "float32"), ("rope", "bfloat16"), ("rope", "float32")):
        lm = get_model("hf")(str(checkpoint(name)), device="cpu", dtype=dtype, batch_size=len(made) + 1)
        calls = []
        lm.model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        numbers(lm, ["sb_text_stream"], metadata, checkpoint(name), use_cache=str(tmp_path / "answers"))
        made.append(len(calls))
    assert all(made[:3])
    assert not made[3]


def test_arguments_of_hf_that_may_change_a_number_set_answers_apart(checkpoint):
    lm, asked = get_model("hf")(str(checkpoint("rope")), device="cpu"), []
    lm.cache_hook = SimpleNamespace(dbdict=SimpleNamespace(get=asked.append))
    names = ["nothing", *[*inspect.signature(type(lm).__init__).parameters][2:-1], "attn_implementation"]
    for name in names:
        lm.sbeval_arguments = (
            (str(checkpoint("rope")),),
            {name: "given"} if name not in ("nothing", "tokenizer") else {},
        )
        Backend(lm, "hf").cached_score("a piece")
    apart = {name for name, key in zip(names, asked, strict=True) if key == asked[0]}
    assert {*names} - apart == {
        *("backend", "revision", "subfolder", "softmax_dtype", "mixed_precision_dtype", "trust_remote_code"),
        *("tp_plan", "peft", "delta", "autogptq", "gptqmodel", "gguf_file", "attn_implementation"),
    }


@pytest.mark.exhaustive
def test_answers_of_a_model_in_memory_are_those_of_its_weights_now(checkpoint, metadata, tmp_path):
    folder = checkpoint("rope")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lm = get_model("hf")(model, tokenizer=str(folder), device="cpu")
    before, stepped = (
        numbers(lm, ["sb_text_stream"], metadata, folder, use_cache=str(tmp_path / "answers"))
        for weight in (1.0, 1.3)
        if model.lm_head.weight.data.mul_(weight) is not None
    )
    assert [*differing(stepped, before)]


@pytest.mark.parametrize("more", [{}, {"auto_map": {"AutoConfig": "conf.C"}}], ids=["unknown", "of its own code"])
def test_a_tokenizer_may_lie_beside_a_configuration_that_nobody_knows(more, server, metadata, tmp_path):
    server.tokenizer.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "config.json").write_text(json.dumps({"model_type": "brand_new", **more}))
    (tmp_path / "new" / "conf.py").write_text("raise SystemExit")
    options = {"tokenizer": str(tmp_path / "new"), "batch_size": 9}
    numbers(over(server, **options), ["sb_text_stream"], metadata, tmp_path / "new")


def test_a_request_that_fails_is_one_sentence_without_the_address_s_key(server, metadata):
    address, server.fails_at = server.arguments["base_url"].replace("http://", "http://me:KEY@"), (3,)
    lm = over(server, base_url=address)
    with pytest.raises(UserError, match=r"local-completions at http://127.* found \w+Error \(500") as refused:
        numbers(lm, ["sb_text_stream"], metadata, Path(server.arguments["tokenizer"]))
    assert "KEY" not in str(refused.value) + json.dumps(recorded := lm.get_model_info()["sbeval"])
    assert [*recorded["inputs"]] == ["tokenizer"]


@pytest.mark.exhaustive
def test_requests_that_fail_side_by_side_are_one_sentence(server, metadata, tmp_path):
    server.fails_at = range(3, 99)
    arguments = ",".join(f"{key}={value}" for key, value in (server.arguments | {"num_concurrent": 3}).items())
    options = ["--tasks", "sb_text_stream", "--metadata", json.dumps(metadata), "--output_path", tmp_path / "results"]
    lm_eval = [Path(sys.executable).parent / "lm_eval", "run", "--model", "local-completions"]
    ended = fresh_process.run(
        [*lm_eval, "--model_args", arguments, *options], environment={"SBEVAL_CACHE": str(tmp_path / "cache")}
    )
    assert ended.returncode == 1
    assert "to score tokens, found ClientResponseError (500" in ended.stderr
    assert "never retrieved" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_least_model_that_scores_tokens_is_enough_whatever_its_name(checkpoint, metadata, tmp_path):
    members = {
        "eot_token_id": 0,
        "tok_encode": lambda self, string, **_: [1],
        "_loglikelihood_tokens": lambda self, requests, **_: [(-2.0 * len(of[2]), False) for of in requests],
        "loglikelihood_rolling": None,
        "generate_until": None,
    }
    lm = type("ChatGLM", (TemplateLM,), members)()
    found = numbers(lm, ["sb_text_stream"], metadata, checkpoint("rope"), use_cache=str(tmp_path / "answers"))
    assert found[0]["sb_text_stream"]["nll@0000064,none"] == pytest.approx(2)


def test_recall_by_sglang_generate_is_refused(server, metadata):
    lm = get_model("sglang-generate")(**server.arguments)
    with pytest.raises(UserError, match="lm-eval inverts that answer for sglang-generate: use local-"):
        numbers(lm, ["sb_mqrar"], metadata, Path(server.arguments["tokenizer"]))


def test_windows_that_a_backend_would_cut_are_refused(server, vllm, checkpoint, metadata):
    folder = checkpoint("rope")
    loads: dict[int, Callable[[int], Any]] = {  # by what has to be asked for beyond a window
        0: lambda length: get_model("hf")(str(folder), device="cpu", dtype="float32", max_length=length),
        1: lambda length: over(server, max_length=length),
        2: lambda length: vllm[1](str(folder), max_model_len=length),
    }
    for beyond, load in loads.items():
        beyond += beyond == 1  # lm-eval takes one for the generated token itself
        numbers(load(64 + beyond), ["sb_text_stream"], metadata, folder)
        with pytest.raises(UserError, match=rf"of at most 63 tokens.*found one of 64: pass max_length={64 + beyond} "):
            numbers(load(63 + beyond), ["sb_text_stream"], metadata, folder)


def test_chunks_of_a_model_whose_rope_depends_on_the_length_are_said_to_be_shorter_inputs(
    checkpoint, metadata, tmp_path, caplog
):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = copied(checkpoint("llama"), tmp_path, rope_parameters=rope)
    for task, said in (("sb_text_fixed_target", False), ("sb_text_position", True)):
        numbers(get_model("hf")(str(folder), device="cpu", dtype="float32"), [task], metadata, folder)
        assert ("chunks before the last are scored as shorter inputs" in caplog.text) is said


def test_an_encoder_is_refused(tmp_path, metadata):
    lm = get_model("hf")(str(t5(tmp_path / "t5")), device="cpu")
    with pytest.raises(UserError, match="Expected a causal language model to score windows of tokens, found seq2seq"):
        numbers(lm, ["sb_text_stream"], metadata, tmp_path / "t5")


@pytest.mark.exhaustive
def test_a_half_precision_model_s_sums_are_float32s(checkpoint, metadata):
    folder, run = checkpoint("llama"), {"device": "cpu", "dtype": "bfloat16"}
    hf = get_model("hf")(str(folder), **run)
    found = numbers(hf, ["sb_text_rolling"], metadata, folder)
    expected = numbers(
        get_model("hf")(str(folder), **run, softmax_dtype="float32"), ["sb_text_rolling"], metadata, folder
    )
    assert found == expected
    assert hf.softmax_dtype is None


def test_a_run_records_its_backend_and_its_checkpoint(checkpoint, metadata):
    records = {}
    for name in ("hf", "sb"):
        lm = get_model(name)(str(checkpoint("rope")), device="cpu", dtype="float32")
        numbers(lm, ["sb_text_stream"], metadata, checkpoint("rope"))
        records[name] = lm.get_model_info()["sbeval"]
    apart = {key for key in records["sb"] if records["hf"][key] != records["sb"][key]}
    # engines such as vLLM count for lm-eval's own, and sb alone changes the loaded model
    assert apart - {"versions"} == {"backend", "tokens_per_second", "prepared"}
    assert records["hf"]["backend"] == "hf"
