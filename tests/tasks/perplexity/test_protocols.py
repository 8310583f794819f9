"""Every number of every protocol against an independent computation, with a model whose answer is a formula."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_problems import BOS, EOS, KnownLM, random_text, run_task, tiny_gpt2, tiny_tokenizer, write_folder
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_table
from ruler_problems import task_manager

from sbeval.corpora import store, tokenizer_sha256
from sbeval.corpora.seen import write_training_spans
from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError
from sbeval.results.intervals import ratio_interval
from sbeval.results.records import TaskRecord, parse_metric_key

LENGTHS = [8, 16, 64]


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_folder(tmp_path / "texts", [40 + 7 * index for index in range(24)])


def documents(folder: Path, *, special_tokens: bool = False, adds_bos: bool = False) -> dict[str, list[int]]:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    return {
        path.name: tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=special_tokens)
        for path in sorted(folder.iterdir())
    }


def metadata(folder: Path, *, adds_bos: bool = False, **more: Any) -> dict[str, Any]:
    tokenizer = folder.parent / f"tokenizer-{adds_bos}"
    tiny_tokenizer(adds_bos=adds_bos).save_pretrained(tokenizer)
    return {"tokenizer": str(tokenizer), "data_path": str(folder), "context_lengths": LENGTHS, **more}


def nll_of(inputs: list[int], targets: list[int]) -> np.ndarray:
    """NLL of the last targets of one window."""
    read = np.arange(len(inputs) - len(targets) + 1, len(inputs) + 1)
    return KnownLM.nll(np.asarray(inputs[-len(targets) :]), np.asarray(targets), read)


def row_sums(samples: list[dict[str, Any]], length: int) -> dict[str, np.ndarray]:
    sums: dict[str, np.ndarray] = {}
    for sample in samples:
        for name, *values in sample[f"nll@{length:07d}"]:
            sums[name] = sums.get(name, np.zeros(4)) + np.asarray(values)
    return sums


@pytest.mark.parametrize("adds_bos", [False, True])
def test_rolling_scores_each_document_alone(corpus, adds_bos):
    found = run_task("sb_stdlib_rolling", KnownLM(), metadata(corpus, adds_bos=adds_bos))
    texts = documents(corpus, special_tokens=True, adds_bos=adds_bos)
    pages = {path.name: path.read_text(encoding="utf-8") for path in corpus.iterdir()}
    for length in LENGTHS:
        sums = row_sums(found["samples"], length)
        for name, tokens in texts.items():
            windows = get_rolling_token_windows(tokens, prefix_token=BOS, max_seq_len=length, context_len=1)
            expected = sum(nll_of(inputs, targets).sum() for inputs, targets in windows)
            assert (sums[name][0], sums[name][1]) == (pytest.approx(expected, rel=1e-6), len(tokens))
        nats = sum(row[0] for row in sums.values())
        words = sum(len(re.split(r"\s+", page)) for page in pages.values())
        size = sum(len(page.encode()) for page in pages.values())
        values = found["values"]
        assert sum(row[3] for row in sums.values()) == size
        assert values[f"nll@{length:07d}"] == pytest.approx(nats / sum(map(len, texts.values())))
        assert values[f"token_perplexity@{length:07d}"] == pytest.approx(math.exp(values[f"nll@{length:07d}"]))
        assert values[f"bits_per_byte@{length:07d}"] == pytest.approx(nats / size / math.log(2))
        assert values[f"byte_perplexity@{length:07d}"] == pytest.approx(math.exp(nats / size))
        assert values[f"word_perplexity@{length:07d}"] == pytest.approx(math.exp(nats / words))
        for metric in ("nll", "token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
            low, high = values[f"{metric}_ci95@{length:07d}"]
            assert low < values[f"{metric}@{length:07d}"] < high
    assert found["record"]["bos"] == "hf"
    assert found["record"]["separator"] is None
    assert found["record"]["added_tokens"] == ({"prefix": ["<s>"], "suffix": []} if adds_bos else None)


def test_rolling_scores_no_added_token_where_the_model_adds_none(corpus: Path) -> None:
    found = run_task("sb_stdlib_rolling", KnownLM(), metadata(corpus, adds_bos=True, add_bos_token=False))
    assert found["values"]["tokens@0000064"] == sum(map(len, documents(corpus).values()))
    assert found["record"]["added_tokens"] is None


@pytest.mark.parametrize(("bos", "adds_bos"), [("text", False), ("window", True)])
def test_stream_scores_the_same_targets_at_every_length(corpus, bos, adds_bos):
    found = run_task("sb_stdlib_stream", KnownLM(), metadata(corpus, adds_bos=adds_bos))
    texts = documents(corpus)
    stream = [token for tokens in texts.values() for token in [*tokens, EOS]]
    owner = [name for name, tokens in texts.items() for _ in [*tokens, EOS]]
    cut = len(stream) // LENGTHS[-1] * LENGTHS[-1]
    assert len(found["samples"]) == cut // LENGTHS[-1]
    for length in LENGTHS:
        expected: dict[str, float] = dict.fromkeys(owner[:cut], 0.0)
        for start in range(0, cut, length):
            lead_in = BOS if bos == "window" else stream[start - 1] if start else EOS
            inputs = [lead_in, *stream[start : start + length - 1]]
            within = slice(start, start + length)
            for name, nats in zip(owner[within], nll_of(inputs, stream[within]), strict=True):
                expected[name] += nats
        sums = row_sums(found["samples"], length)
        assert {name: row[0] for name, row in sums.items()} == pytest.approx(expected, rel=1e-6)
        assert found["values"][f"tokens@{length:07d}"] == cut
        assert found["values"][f"clusters@{length:07d}"] == len(expected)
        assert not any("nll_change" in key for key in found["values"])
    assert (found["record"]["bos"], found["record"]["separator"]) == (bos, "</s>")


def test_fixed_target_scores_identical_targets_with_growing_context(corpus):
    model = KnownLM()
    found = run_task("sb_stdlib_fixed_target", model, metadata(corpus))
    texts = documents(corpus)
    targets = LENGTHS[0] // 2
    assert found["record"]["targets_per_window"] == targets
    assert {(length, scored) for _, length, _, scored in model.seen} == {(length, targets) for length in LENGTHS}
    fit = {name for name, tokens in texts.items() if len(tokens) >= LENGTHS[-1] + targets}
    assert [sample["nll@0000008"][0][0] for sample in found["samples"]][: len(fit)] == sorted(fit)
    flat = np.cumsum([0, *(len(tokens) + 1 for tokens in texts.values())])
    stream = [token for tokens in texts.values() for token in [*tokens, EOS]]
    starts = dict(zip(texts, flat, strict=False))
    for sample in found["samples"]:
        name = sample["nll@0000008"][0][0]
        start, stop = sample["doc"]["start"], sample["doc"]["stop"]
        assert starts[name] + LENGTHS[-1] <= start
        assert stop <= starts[name] + len(texts[name])
        page = (corpus / name).read_text(encoding="utf-8")
        offsets = tiny_tokenizer()(page, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for end, position in (("start_byte", start), ("stop_byte", stop)):
            characters = max(last for _, last in offsets[: position - starts[name]])
            assert sample["doc"][end] == len(page[:characters].encode())
        for length in LENGTHS:
            inputs = stream[stop - length - 1 : stop - 1]
            ((_, nats, tokens, _, _),) = sample[f"nll@{length:07d}"]
            assert tokens == targets
            assert nats == pytest.approx(nll_of(inputs, stream[start:stop]).sum(), rel=1e-6)
    short, long = row_sums(found["samples"], 8), row_sums(found["samples"], 64)
    gains, tokens = zip(*((long[name][0] - short[name][0], long[name][1]) for name in sorted(long)), strict=True)
    change = ratio_interval([*gains], [*tokens], seed=found["record"]["seed"])
    assert found["values"]["nll_change@0000064"] == pytest.approx(change.estimate)
    nll = [found["values"][f"nll@{length:07d}"] for length in (64, 8)]
    assert found["values"]["nll_change@0000064"] == pytest.approx(nll[0] - nll[1])
    assert found["values"]["nll_change@0000064"] < 0
    assert found["whole"]["higher_is_better"]["sb_stdlib_fixed_target"]["nll_change@0000064"] is False
    assert "nll_change@0000008" not in found["values"]
    assert found["record"]["own_document_share"] == {"8": 1.0, "16": 1.0, "64": 1.0}


def test_fixed_target_has_room_for_its_targets_beside_the_longest_context(corpus):
    room = max(map(len, documents(corpus).values())) - LENGTHS[0] // 2
    run_task("sb_stdlib_fixed_target", KnownLM(), metadata(corpus) | {"context_lengths": [LENGTHS[0], room]})
    with pytest.raises(UserError, match=f"{room + 1} tokens, only up to {room}, because"):
        run_task("sb_stdlib_fixed_target", KnownLM(), metadata(corpus) | {"context_lengths": [LENGTHS[0], room + 1]})


def test_fixed_target_in_the_stream_says_so(corpus):
    found = run_task("sb_stdlib_fixed_target", KnownLM(), metadata(corpus, context="stream", targets_per_window=2))
    total = sum(len(tokens) + 1 for tokens in documents(corpus).values())
    assert len(found["samples"]) == total // LENGTHS[-1]
    assert (found["record"]["context"], found["record"]["targets_per_window"]) == ("stream", 2)
    shares = found["record"]["own_document_share"]
    assert 0 <= shares["64"] <= shares["16"] <= shares["8"] < 1


@pytest.mark.parametrize("stride", [None, 4])
def test_sliding_scores_every_token_once_from_full_windows(corpus, stride):
    found = run_task("sb_stdlib_sliding", KnownLM(), metadata(corpus, stride=stride))
    stream = [token for tokens in documents(corpus).values() for token in [*tokens, EOS]]
    cut = len(stream) // 64 * 64
    assert found["record"]["strides"] == {str(length): stride or length // 2 for length in LENGTHS}
    for length in LENGTHS:
        step = stride or length // 2
        total = nll_of([EOS, *stream[: length - 1]], stream[:length]).sum()
        for stop in range(length + step, cut + 1, step):
            total += nll_of(stream[stop - length - 1 : stop - 1], stream[stop - step : stop]).sum()
        assert found["values"][f"tokens@{length:07d}"] == cut
        assert found["values"][f"nll@{length:07d}"] == pytest.approx(total / cut, rel=1e-6)


@pytest.mark.parametrize("protocol", ["stream", "position", "sliding"])
def test_long_documents_are_a_series_of_their_own(corpus, protocol):
    task, more = ("sliding", {"context": "document"}) if protocol == "sliding" else (f"{protocol}_long", {})
    found = run_task(f"sb_stdlib_{task}", KnownLM(), metadata(corpus, **more))
    blocks = {name: len(tokens) // 64 for name, tokens in documents(corpus).items() if len(tokens) >= 64}
    clusters = [sample["nll@0000064"][0][0] for sample in found["samples"]]
    assert {name: clusters.count(name) for name in clusters} == blocks
    assert set(clusters[: len(blocks)]) == set(blocks)
    assert all(len(sample["nll@0000064"]) == 1 for sample in found["samples"])
    assert found["record"]["context"] == "document"
    assert set(found["record"]["own_document_share"].values()) == {1.0}


def test_position_gives_the_mean_and_interval_of_every_bin_from_one_pass(corpus):
    model = KnownLM()
    found = run_task("sb_stdlib_position", model, metadata(corpus))
    assert found["record"]["lengths"] == [64]
    assert found["values"]["position_nll"][-1][1] == 64
    texts = documents(corpus)
    stream = [token for tokens in texts.values() for token in [*tokens, EOS]]
    owner = [name for name, tokens in texts.items() for _ in [*tokens, EOS]]
    blocks = len(stream) // 64
    assert len(model.seen) == blocks
    values = found["values"]
    low_high, clusters = values["position_nll_ci95"], values["position_clusters"]
    assert len(low_high) == len(clusters) == len(values["position_nll"])
    assert [interval is None for interval in low_high] == [count < 20 for count in clusters]
    for (first, last, mean, tokens), interval, count in zip(values["position_nll"], low_high, clusters, strict=True):
        assert tokens == blocks * (last - first + 1)
        sums: dict[str, list[float]] = {}
        for start in range(0, blocks * 64, 64):
            inputs = [stream[start - 1] if start else EOS, *stream[start : start + 63]]
            nll = nll_of(inputs, stream[start : start + 64])[first - 1 : last]
            for name, nats in zip(owner[start + first - 1 : start + last], nll, strict=True):
                row = sums.setdefault(name, [0.0, 0.0])
                row[0] += nats
                row[1] += 1
        columns = zip(*(sums[name] for name in sorted(sums)), strict=True)
        expected = ratio_interval(*map(list, columns), seed=found["record"]["seed"])
        assert count == len(sums) == expected.clusters
        assert mean == pytest.approx(expected.estimate, rel=1e-5)
        if interval is not None:
            assert interval == pytest.approx([expected.low, expected.high], rel=1e-4)


@pytest.mark.parametrize("protocol", ["rolling", "stream", "fixed_target", "position"])
def test_files_and_tables_survive_and_the_record_is_whole(corpus, protocol):
    found = run_task(f"sb_stdlib_{protocol}", KnownLM(), metadata(corpus), limit=3)
    assert len(found["samples"]) == 3
    text = json.loads(json.dumps(found["whole"], default=handle_non_serializable))
    for key, value in text["results"][f"sb_stdlib_{protocol}"].items():
        parsed = parse_metric_key(key)
        if parsed and parsed[0].endswith("_ci95"):
            assert value is None, "three clusters at most are too few for an interval"
    assert set(found["samples"][0]["metrics"]) <= {*(f"nll@{length:07d}" for length in LENGTHS), "position_nll"}
    assert max(map(len, make_table(found["whole"]).splitlines())) < 140
    record = TaskRecord.from_json(text["configs"][f"sb_stdlib_{protocol}"]["metadata"]["sbeval"])
    assert (record.family, record.corpus, record.protocol) == ("perplexity", corpus.name, protocol)
    assert record.corpus_sha256 is not None
    assert record.tokenizer_sha256 is not None
    assert record.own_document_share is not None


def test_a_run_says_and_records_which_documents_its_model_was_trained_on(corpus, tmp_path, caplog):
    given = metadata(corpus, pretrained=str(tmp_path))
    texts = documents(corpus)
    longest = max(texts, key=lambda name: len(texts[name]))
    write_training_spans([np.array(texts[longest])], tokenizer_sha256(load_tokenizer(given["tokenizer"])), tmp_path)
    assert run_task("sb_stdlib_stream", KnownLM(), given)["record"]["seen_documents"] == [longest]
    assert f"at least 1 of the scored documents, such as {longest}" in caplog.text


def test_group_runs_every_protocol_on_one_tokenisation(corpus, monkeypatch):
    names = ["wikitext", "stdlib", "pile", "pg19", "text"]
    loaded = task_manager(metadata(corpus)).load([f"sb_{name}{end}" for name in names for end in ("", "_long")])
    assert sorted(loaded["tasks"]) == sorted(
        f"sb_{name}_{protocol}"
        for name in names
        for protocol in ("rolling", "stream", "fixed_target", "position", "stream_long", "position_long")
    )
    assert len(store._open) == 2, "wikitext is detokenised, the others are one text"


DEFAULTS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]


@pytest.mark.parametrize(
    ("task", "choices", "scored", "reason"),
    [
        ("stream", {"max_length": 1024}, DEFAULTS[:2], "the model was given max_length=1024"),
        ("stream", {"pretrained": "gpt2"}, DEFAULTS[:1], "the model has 600 learned position embeddings"),
        ("rolling", {"pretrained": "gpt2"}, DEFAULTS[:1], "the model has 600 learned position embeddings"),
        ("rolling", {}, DEFAULTS[:2], "no document is longer than"),
        ("stream", {}, DEFAULTS[:4], "the whole text has"),
    ],
)
def test_default_lengths_that_do_not_fit_are_dropped_and_the_reason_is_named(
    corpus, tmp_path, caplog, task, choices, scored, reason
):
    if "pretrained" in choices:
        choices = {"pretrained": str(tiny_gpt2(tmp_path / "gpt2", positions=600))}
    values = metadata(corpus, **choices)
    del values["context_lengths"]
    found = run_task(f"sb_stdlib_{task}", KnownLM(), values)
    assert found["record"]["lengths"] == scored
    assert found["record"]["dropped_lengths"] == DEFAULTS[len(scored) :]
    assert reason in caplog.text


def test_a_length_beyond_the_learned_positions_is_refused_by_name(corpus, tmp_path):
    choices = metadata(corpus, pretrained=str(tiny_gpt2(tmp_path / "gpt2", positions=32)))
    with pytest.raises(UserError, match=r"64 tokens, only up to 32, because the model has 32 learned position"):
        run_task("sb_stdlib_stream", KnownLM(), choices)


def test_shuffled_answers_are_refused(corpus):
    class Short(KnownLM):
        def token_logprobs(self, requests: list[Any]) -> list[Any]:
            return [type(answer)(answer.logprobs[1:]) for answer in super().token_logprobs(requests)]

    with pytest.raises(ValueError, match="log-probabilities"):
        run_task("sb_stdlib_stream", Short(), metadata(corpus))


def few_documents(text: str) -> bool:
    return "and a confidence interval needs 20" in text


@pytest.mark.parametrize("split", ["paragraph", "40 tokens", r"\n\n(?=\S)"])
def test_one_long_file_has_intervals_where_it_is_split_and_a_warning_where_not(tmp_path, caplog, split):
    (tmp_path / "texts").mkdir()
    file = tmp_path / "texts" / "own.txt"
    file.write_text("\n\n".join(random_text(30 + index, index).replace("\n", " ") for index in range(25)))
    whole = run_task("sb_text_rolling", KnownLM(), metadata(tmp_path / "texts", data_path=str(file)))
    assert whole["values"]["nll_ci95@0000016"] is None
    assert "1 document is scored" in caplog.text
    assert few_documents(caplog.text)
    caplog.clear()
    parts = run_task("sb_text_rolling", KnownLM(), metadata(tmp_path / "texts", data_path=str(file), split=split))
    low, high = parts["values"]["nll_ci95@0000016"]
    assert low < high
    assert not few_documents(caplog.text)
    assert parts["record"]["corpus"] == "own"
    assert parts["record"]["corpus_detail"] == f"own.txt, split by {split}"


def test_a_limit_to_few_documents_is_said_before_any_is_scored(corpus, caplog):
    run_task("sb_stdlib_rolling", KnownLM(), metadata(corpus), limit=3)
    assert "3 documents are scored" in caplog.text
    caplog.clear()
    run_task("sb_stdlib_rolling", KnownLM(), metadata(corpus))
    assert not few_documents(caplog.text)


def test_wikitext_s_pages_are_not_split(corpus):
    with pytest.raises(UserError, match="wikitext are its pages and cannot be split"):
        run_task("sb_wikitext_rolling", KnownLM(), metadata(corpus, split="paragraph"))


def finished(run: dict[str, Any], file: Path) -> str:
    configs = {"sb_stdlib_fixed_target": {"metadata": {"sbeval": run["record"]}}}
    file.write_text(json.dumps({"results": {}, "configs": configs}))
    return str(file)


def test_a_run_that_continues_another_scores_its_targets_at_further_lengths(corpus, tmp_path):
    def at(lengths: list[int], **more: Any) -> dict[str, Any]:
        return run_task("sb_stdlib_fixed_target", KnownLM(), metadata(corpus, **more) | {"context_lengths": lengths})

    def rows(run: dict[str, Any], length: int) -> list[Any]:
        return [sample[f"nll@{length:07d}"] for sample in run["samples"]]

    whole, first, alone = at([16, 32, 64]), at([32, 64]), at([16])
    assert alone["record"]["targets_sha256"] != whole["record"]["targets_sha256"]
    assert at([64], targets_per_window=8)["record"]["targets_sha256"] == whole["record"]["targets_sha256"]
    results = finished(whole, tmp_path / "results.json")
    second = at([32], continues=results)
    assert rows(second, 32) == rows(whole, 32)
    third = at([8, 48], continues=finished(second, tmp_path / "second.json"))
    assert third["record"]["targets_sha256"] == whole["record"]["targets_sha256"]
    with pytest.raises(UserError, match=r"found only \d+ of \d+ blocks .* to have 64: .* \[16, 32, 64, 120\]"):
        at([120], continues=results)
    with pytest.raises(UserError, match="at most the shortest context length, 4"):
        at([4], continues=results)
    with pytest.raises(UserError, match="found different ones"):
        at([8], continues=results, blocks_per_document=1)
    with pytest.raises(UserError, match="record which targets"):
        run_task("sb_wikitext_fixed_target", KnownLM(), metadata(corpus, continues=results))
    with pytest.raises(UserError, match="only fixed_target scores"):
        run_task("sb_stdlib_stream", KnownLM(), metadata(corpus, continues=results))
    assert first["record"]["room_tokens"] == 64


def test_a_stream_s_targets_are_the_same_however_windows_cut_them(corpus):
    cut = [("stream", [64]), ("stream", [8, 64]), ("sliding", [32, 64])]
    runs = [run_task(f"sb_stdlib_{p}", KnownLM(), metadata(corpus) | {"context_lengths": n}) for p, n in cut]
    assert len({run["record"]["targets_sha256"] for run in runs}) == 1
