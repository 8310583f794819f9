"""LongPPL: key tokens from the evaluator's forward passes, and perplexity on only these."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from corpus_problems import KnownLM, run_task, tiny_llama, tiny_tokenizer, write_folder
from transformers import AutoModelForCausalLM

from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.tasks.perplexity import longppl
from tests.marks import exhaustive

SHORT, LONG = 8, 64
SHARPNESS = 40.0  # makes some gains as large as LongPPL asks for


@pytest.fixture
def metadata(tmp_path) -> dict[str, Any]:
    tiny_tokenizer().save_pretrained(tmp_path / "evaluator")
    tiny_llama(sharpness=SHARPNESS).save_pretrained(tmp_path / "evaluator")
    return {
        "tokenizer": str(tmp_path / "evaluator"),
        "data_path": str(write_folder(tmp_path / "texts", [60 + 5 * index for index in range(24)])),
        "context_lengths": [SHORT, LONG],
        "targets_per_window": 8,
        "longppl_evaluator": str(tmp_path / "evaluator"),
    }


def test_longppl_is_perplexity_on_the_evaluators_key_tokens(metadata):
    model, evaluator = KnownLM(), tiny_llama(sharpness=SHARPNESS)
    found = run_task("sb_stdlib_fixed_target", model, metadata)
    by_length: dict[int, list[tuple[Any, ...]]] = {SHORT: [], LONG: []}
    for arguments in model.seen:
        by_length[arguments[1]].append(arguments)
    nll: dict[int, list[float]] = {SHORT: [], LONG: []}
    for requests in zip(by_length[SHORT], by_length[LONG], strict=True):
        evaluated, known = {}, {}
        for key, length, lead_in, scored in requests:
            targets = resolve_tokens(key).astype(np.int64)
            inputs = np.concatenate([[lead_in], targets[:-1]])
            logits = evaluator(torch.from_numpy(inputs)[None]).logits[0].log_softmax(-1)
            evaluated[length] = logits[torch.arange(length), torch.from_numpy(targets)][-scored:].detach().numpy()
            known[length] = KnownLM.nll(inputs, targets, np.arange(1, length + 1))[-scored:]
        mask = (evaluated[LONG] - evaluated[SHORT] > 2) & (evaluated[LONG] > -2)
        for length in (SHORT, LONG):
            nll[length] += known[length][mask].tolist()
    assert 0 < len(nll[LONG]) < 8 * len(found["samples"])
    for length in (SHORT, LONG):
        assert found["values"][f"longppl@{length:07d}"] == pytest.approx(math.exp(np.mean(nll[length])), rel=1e-6)
        assert found["values"][f"longppl_tokens@{length:07d}"] == len(nll[length])
    assert found["record"]["longppl"]["long"] == LONG


@pytest.mark.exhaustive
def test_a_second_run_needs_no_evaluator_and_another_one_is_asked_anew(metadata, tmp_path, monkeypatch):
    asked: list[Any] = []
    computed = longppl._Evaluator._computed
    monkeypatch.setattr(longppl._Evaluator, "_computed", lambda self, *of: (asked.append(of), computed(self, *of))[1])
    first = run_task("sb_stdlib_fixed_target", KnownLM(), metadata)
    assert first["values"][f"longppl_tokens@{LONG:07d}"] > 0
    requests = len(asked)
    assert run_task("sb_stdlib_fixed_target", KnownLM(), metadata)["values"] == first["values"]
    assert len(asked) == requests
    weights = tmp_path / "evaluator" / "model.safetensors"
    stat = weights.stat()
    tiny_llama(sharpness=SHARPNESS / 2).save_pretrained(tmp_path / "evaluator")
    assert weights.stat().st_size == stat.st_size
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    third = run_task("sb_stdlib_fixed_target", KnownLM(), metadata)
    assert third["values"][f"longppl@{LONG:07d}"] != first["values"][f"longppl@{LONG:07d}"]


@pytest.mark.exhaustive
def test_the_evaluator_has_the_dtype_asked_for_and_its_answers_are_kept_apart(metadata, monkeypatch):
    loaded = []
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def seen(*arguments: Any, **options: Any) -> Any:
        model, tensors = from_pretrained(*arguments, **options)
        loaded.append(model.dtype)
        return model, tensors

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", seen)
    runs = [{}, {"dtype": "bfloat16"}, {"dtype": torch.bfloat16}, {"dtype": "float32"}, {}]
    found = [run_task("sb_stdlib_fixed_target", KnownLM(), metadata | options) for options in runs]
    assert loaded == [torch.float32, torch.bfloat16, torch.float32]  # the third and the last run read cached answers
    assert [one["record"]["longppl"]["dtype"] for one in found] == ["auto", "bfloat16", "bfloat16", "float32", "auto"]
    assert found[1]["values"] == found[2]["values"]
    assert found[0]["values"] == found[4]["values"]


def test_an_evaluator_on_another_device_of_another_dtype_or_configuration_is_another(metadata, monkeypatch):
    folder = metadata["longppl_evaluator"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = [longppl.evaluator_identity(folder), longppl.evaluator_identity(folder)]
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        found.append(longppl.evaluator_identity(folder))
    config = Path(folder) / "config.json"
    config.write_text(config.read_text().replace("float32", "bfloat16"))
    found.append(longppl.evaluator_identity(folder))
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize("vocabulary", [300, *exhaustive(258, 400)])
def test_other_tokenizers_tokens_match_by_characters(metadata, tmp_path, vocabulary):
    other, own = tiny_tokenizer(vocabulary=vocabulary, adds_bos=vocabulary == 400), tiny_tokenizer()
    other.save_pretrained(tmp_path / "evaluator")
    own.save_pretrained(tmp_path / "own")
    model, evaluator = KnownLM(), tiny_llama(sharpness=SHARPNESS)
    metadata |= {"tokenizer": str(tmp_path / "own")}
    found = run_task("sb_stdlib_fixed_target", model, metadata)
    requests = {length: [one for one in model.seen if one[1] == length] for length in (SHORT, LONG)}
    expected = []
    for short, long in zip(requests[SHORT], requests[LONG], strict=True):
        texts = [own.decode(resolve_tokens(request[0]).tolist()) for request in (short, long)]
        encoded = [other(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
        scores = []
        for tokens in encoded:
            inputs = torch.tensor([[other.bos_token_id, *tokens["input_ids"][:-1]]])
            logprobs = evaluator(inputs).logits[0].log_softmax(-1).detach().numpy()
            scores.append(logprobs[np.arange(len(tokens["input_ids"])), tokens["input_ids"]])
        again = own(texts[1], add_special_tokens=False, return_offsets_mapping=True)
        targets = again["offset_mapping"][-long[3] :]
        if again["input_ids"][-long[3] :] != resolve_tokens(long[0])[-long[3] :].tolist():
            expected.append(None)  # the window ends within a character
            continue
        key = np.zeros(len(texts[1]), dtype=bool)
        for back in range(1, len(scores[0]) + 1):
            if encoded[0]["input_ids"][-back] != encoded[1]["input_ids"][-back]:
                break
            begin, end = encoded[1]["offset_mapping"][-back]
            if end <= targets[0][0]:
                break
            key[begin:end] |= scores[1][-back] - scores[0][-back] > 2 and scores[1][-back] > -2
        expected.append(sum(bool(end > begin and key[begin:end].all()) for begin, end in targets))
    counts = [sample[f"longppl@{LONG:07d}"][0][2] for sample in found["samples"]]
    assert all(known in (count, None) for count, known in zip(counts, expected, strict=True))
    assert expected.count(None) < len(expected) / 4
    assert sum(counts) < 8 * len(counts)
    assert sum(counts) > 0 or vocabulary == 258  # single bytes seldom fill a token
    assert run_task("sb_stdlib_fixed_target", KnownLM(), metadata)["values"] == found["values"]


def test_an_evaluator_whose_tokenizer_tells_no_characters_is_refused(metadata, tmp_path, monkeypatch):
    tiny_tokenizer(adds_bos=True).save_pretrained(tmp_path / "other")
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(UserError, match="nor a fast one, which gives character offsets"):
        run_task("sb_stdlib_fixed_target", KnownLM(), metadata | {"tokenizer": str(tmp_path / "other")})


def test_a_missing_evaluator_and_a_single_length_are_refused(metadata):
    with pytest.raises(UserError, match="nowhere"):
        run_task("sb_stdlib_fixed_target", KnownLM(), metadata | {"longppl_evaluator": "/nowhere/at/all"})
    with pytest.raises(UserError, match="two context_lengths"):
        run_task("sb_stdlib_fixed_target", KnownLM(), metadata | {"context_lengths": [16]})
