import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from document_sums import sums_of
from experiment_files import mqrar_task, span_task
from result_files import (
    CURVES,
    LENGTHS,
    model_record,
    ordinary_task,
    perplexity_task,
    position_task,
    ruler_task,
    text_of,
    write_run,
)

from sbeval.errors import UserError
from sbeval.reports import build_report, load_results
from sbeval.reports.analyse.panels import perplexity_panels
from sbeval.reports.analyse.selection import pool_seeds
from sbeval.reports.kinds.position_sums import POSITION_SUMS
from sbeval.reports.read import files
from sbeval.reports.read.samples import SAMPLE_SCORES
from tests.marks import exhaustive

EVIL = "<script>alert('x')</script> \"quoted\" \N{RIGHT-TO-LEFT OVERRIDE}txt \N{FIRE} ../../etc & | ` $x_1$ \\"


def good(folder: Path, **changes: object) -> Path:
    task = perplexity_task("stream", CURVES["stickbreaking"])
    return write_run(folder, model_record("stickbreaking"), [task], **changes)


def reasons(folder: Path) -> str:
    return " ".join(note.reason for note in load_results([folder]).notes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"results": {"sb_stdlib_stream": {"nll@00', "not complete JSON"),
        ("", "is empty"),
        ("[1, 2]", "not a result file of lm-eval"),
        *((kind, "left out: the file cannot be read (it is not a regular file)") for kind in ("a folder", "a pipe")),
    ],
)
def test_a_file_that_holds_no_results_is_left_out_and_named(tmp_path: Path, text: str, reason: str) -> None:
    broken = tmp_path / "b" / "results_2026-11-20T11-00-00.json"
    broken.parent.mkdir()
    {"a folder": broken.mkdir, "a pipe": lambda: os.mkfifo(broken)}.get(text, lambda: broken.write_text(text))()
    with pytest.raises(UserError, match=re.escape(reason)):
        load_results([tmp_path])
    good(tmp_path / "a")
    (note,) = load_results([tmp_path]).notes
    assert note.path == broken
    assert reason in note.reason


@pytest.mark.parametrize(("good_files", "others"), [(3, 2), *exhaustive((1, 0), (1, 1))])
def test_how_many_files_were_read_and_left_out_is_printed(
    good_files: int, others: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in range(good_files):
        good(tmp_path / "r" / str(place), seconds=1_795_000_000.0 + place)
    for place in range(others):
        (tmp_path / "r" / f"results_{place}.json").write_text('{"scores": {}}')
    build_report([tmp_path / "r"], tmp_path / "out", image_formats=())
    left_out = f", {others} left out (see Notes)" if others else ""
    read = "1 file" if good_files == 1 else f"{good_files} files"
    assert capsys.readouterr().out.splitlines()[-1] == f"{read} read{left_out}"


def test_samples_without_results_are_named(tmp_path: Path) -> None:
    good(tmp_path / "a")
    (tmp_path / "samples_sb_stdlib_stream_2026-11-19T10-00-00.000001.jsonl").write_text("{}\n")
    assert "no result file beside them" in reasons(tmp_path)


def test_the_newest_of_two_runs_counts_and_the_other_is_listed(tmp_path: Path) -> None:
    good(tmp_path / "a", seconds=1_795_000_000.0)
    newer = [value + 0.5 for value in CURVES["stickbreaking"]]
    task = perplexity_task("stream", newer)
    write_run(tmp_path / "b", model_record("stickbreaking"), [task], seconds=1_795_100_000.0)
    results = load_results([tmp_path])
    nll = results.measurements[results.measurements["metric"] == "nll"]
    assert nll["value"].to_numpy() == pytest.approx(newer, abs=0.15)
    assert len(nll) == len(LENGTHS)
    assert any("run again later" in note.reason for note in results.notes)


def test_lengths_run_one_by_one_join_into_one_line(tmp_path: Path) -> None:
    for index, length in enumerate(LENGTHS[:3]):
        task = perplexity_task("stream", CURVES["rope"][index : index + 1], lengths=[length])
        write_run(tmp_path / str(length), model_record("rope"), [task], seconds=1_795_000_000.0 + index)
    results = load_results([tmp_path])
    assert len(results.models) == 1
    assert sums_of(results, "demo-rope", "sb_stdlib_stream").lengths == LENGTHS[:3]
    assert not results.notes


def test_a_document_sum_that_is_not_finite_never_enters_a_mean(tmp_path: Path) -> None:
    name, results, metadata, samples = perplexity_task("fixed_target", CURVES["rope"])
    samples[0]["nll@0002048"][0][1] = float("nan")
    write_run(tmp_path, model_record("rope"), [(name, results, metadata, samples)])
    loaded = load_results([tmp_path])
    sums = sums_of(loaded, "demo-rope", name)
    row = sums.clusters.index(samples[0]["nll@0002048"][0][0])
    assert sums.tokens[row, sums.lengths.index(2048)] == 0
    assert any("not finite" in note.reason for note in loaded.notes)


def test_unknown_fields_of_a_newer_writer_are_no_obstacle(tmp_path: Path) -> None:
    path = good(tmp_path / "a", extra={"invented_later": {"deep": [1]}})
    content = json.loads(path.read_text())
    content["config"]["sbeval"]["colour"] = "blue"
    content["configs"]["sb_stdlib_stream"]["metadata"]["sbeval"]["mood"] = 3
    content["results"]["sb_stdlib_stream"]["shape_of_things@0001024,none"] = {"a": 1}
    path.write_text(json.dumps(content))
    results = load_results([tmp_path])
    assert results.models[0].runs[0].raw["invented_later"] == {"deep": [1]}
    assert len(results.measurements) == len(LENGTHS) * 3


def test_ordinary_runs_of_lm_eval_are_read_without_any_of_our_records(tmp_path: Path) -> None:
    own = {"4096,none": 0.9, "8192,none": 0.5, "16384,none": -1, "4096_stderr,none": 0.02, "alias": "niah_single_1"}
    write_run(tmp_path / "r", None, [ordinary_task("hellaswag", "acc_norm", 0.31), ("niah_single_1", own, None, [])])
    results = load_results([tmp_path])
    scores = results.measurements[results.measurements["metric"] == "score"]
    assert dict(zip(scores["context_length_tokens"], scores["value"], strict=True)) == {4096: 0.9, 8192: 0.5}
    assert "training length not recorded" in text_of(tmp_path / "r", "index.html")


def test_hostile_names_are_text_in_every_kind_of_table_and_never_a_path(tmp_path: Path) -> None:
    tasks = [mqrar_task(64), span_task("stickbreaking"), ordinary_task(EVIL, "acc", 0.5)]
    name, metrics, record, samples = ruler_task("sb_ruler_vt", 4000)
    tasks.append((name, {**metrics, "<img src=x>@0001024,none": 1.0}, record, samples))
    _, metrics, record, samples = perplexity_task("stream", CURVES["stickbreaking"], documents=25)
    tasks.append(("sb_evil", metrics, {**(record or {}), "corpus": EVIL, "corpus_detail": EVIL}, samples))
    write_run(tmp_path / "r", model_record("stickbreaking", name=EVIL, gpu=EVIL), tasks, log_samples=False)
    output = tmp_path / "out" / "report"
    page = build_report([tmp_path / "r"], output, image_formats=("svg",)).read_text(encoding="utf-8")
    assert page.count("<caption>") >= 5
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "<bdi>" in page
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in page[page.index("<h2") : page.index('id="provenance"')]
    for text in (page[: page.index('<script type="application/json"')], (output / "summary.md").read_text("utf-8")):
        assert "<script>alert" not in text
        assert "<img src=x>" not in text
    written = [path for path in tmp_path.rglob("*") if path.is_file() and output not in path.parents]
    assert [path.parent.name for path in written] == ["r"]
    for path in (output / "latex").iterdir():
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in path.read_text(encoding="utf-8")


def test_a_samples_file_is_read_one_line_at_a_time(tmp_path: Path) -> None:
    import tracemalloc

    good(tmp_path)
    samples = next(tmp_path.glob("samples_*.jsonl"))
    padding = json.dumps({"doc": "x" * 1_000_000, "filter": "none"}) + "\n"
    with samples.open("a", encoding="utf-8") as file:
        file.writelines(padding for _ in range(40))
    tracemalloc.start()
    load_results([tmp_path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


def test_a_label_for_nobody_and_a_folder_that_cannot_be_one_are_said(tmp_path: Path) -> None:
    good(tmp_path / "r")
    with pytest.raises(UserError, match="Expected --label to name one of demo-sb, stdlib, found 'demo-bs'"):
        build_report([tmp_path / "r"], tmp_path / "report", labels={"demo-bs": "SB"}, image_formats=())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to, for"):
        build_report([tmp_path / "r"], tmp_path / "file" / "report", image_formats=())


RECORD = {"name": "m", "format": "f", "training_length_tokens": 1024}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rope_scaling", "yes"), ("extrapolation", "self_extend"), ("skip_threshold", "0.1")),
        *(("extended_from", "parent"), ("sliding_window", -1), ("parameters", 10**400), ("versions", ["torch"])),
        *(("max_length", float("nan")), ("attention", ["rope"])),
    ],
)
def test_a_field_of_another_kind_is_missing_and_the_rest_counts(tmp_path: Path, field: str, value: object) -> None:
    path = good(tmp_path / "r")
    content = json.loads(path.read_text())
    content["config"]["sbeval"] = RECORD | {field: value}
    path.write_text(json.dumps(content))
    (model,) = load_results([tmp_path]).models
    assert getattr(model.record, field) in (None, {})
    assert (model.label, model.record.training_length_tokens) == ("m", 1024)
    assert f"holds no usable value of {field}: left as missing." in reasons(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("lengths", None), ("lengths", ["a"]), ("protocol", 3)])
def test_a_task_record_that_cannot_be_used_is_a_note(tmp_path: Path, field: str, value: object) -> None:
    path = good(tmp_path / "r")
    content = json.loads(path.read_text())
    content["configs"]["sb_stdlib_stream"]["metadata"]["sbeval"][field] = value
    path.write_text(json.dumps(content))
    words = f"the record of task sb_stdlib_stream was not used: {field} missing or of the wrong type."
    assert words in text_of(tmp_path / "r", "index.html")


def test_numbers_that_are_none_or_beyond_all_measure_are_missing(tmp_path: Path) -> None:
    path = good(tmp_path)
    content = json.loads(path.read_text())
    content["results"]["sb_stdlib_stream"] |= {
        "nll@0001024,none": 1000.0,
        "token_perplexity@0001024,none": 0.0,
        "nll@0000256,none": 1e308,
        "nll@0000512,none": 10**400,
        "nll@0002048,none": float("nan"),
        "nll@0004096,none": float("inf"),
        "nll@0008192,none": [None],
        "nll@0000000,none": 2.0,
        "nll@99999999999999999999,none": 2.0,
    }
    path.write_text(json.dumps(content))
    assert build_report([tmp_path], tmp_path / "report", image_formats=()).is_file()
    results = load_results([tmp_path])
    rows = results.measurements[results.measurements["metric"] == "nll"]
    assert rows["context_length_tokens"].tolist() == [1024, *LENGTHS[6:]]
    assert sum("is no context length" in note.reason for note in results.notes) == 2
    assert sum("left as missing" in note.reason for note in results.notes) == 5


def test_samples_of_any_shape_are_no_obstacle(tmp_path: Path) -> None:
    good(tmp_path / "r")
    (samples,) = (tmp_path / "r").glob("samples_*.jsonl")
    odd: list[object] = [None, 3, "x", [], [[]], [["a"]], [["a", 1e308, 5, 1, 1]], [["a", None, 2, 1, 1]], {"a": 1}]
    lines = [{"nll@0000256": value, "position_nll": value, "metrics": [{}, "acc"], "doc": value} for value in odd]
    with samples.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    results = load_results([tmp_path / "r"])
    assert sums_of(results, "demo-sb", "sb_stdlib_stream").lengths == LENGTHS
    assert any("4 document sums are not finite numbers" in note.reason for note in results.notes)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: lines[:3], "holds 3 of 4 samples: paired differences use only these"),
        (lambda lines: lines + lines, "4 samples are repeated: the first of each counts"),
        (lambda lines: [*lines[1:], lines[0].replace(b'"filter"', b'"fil\xffer"')], "1 line that is not complete JSON"),
        (lambda lines: None, "samples are left out: it is no regular file"),
    ],
)
def test_samples_that_were_cut_off_or_doubled_are_named(damage, words: str, tmp_path: Path) -> None:
    path = write_run(tmp_path, model_record("rope"), [perplexity_task("stream", CURVES["rope"], documents=24)])
    (samples,) = path.parent.glob("samples_*.jsonl")
    lines = damage(samples.read_bytes().splitlines(True))
    whole = sums_of(load_results([tmp_path]), "demo-rope", "sb_stdlib_stream")
    samples.unlink()
    samples.write_bytes(b"".join(lines)) if lines else samples.mkdir()
    assert words in reasons(tmp_path)
    if lines and len(lines) > 4:
        found = sums_of(load_results([tmp_path]), "demo-rope", "sb_stdlib_stream")
        assert found.nll_nats.tolist() == whole.nll_nats.tolist()


@pytest.mark.parametrize(
    ("key", "characters", "read"),
    [("arguments", 40_000, True), ("arguments", 400_000, False), ("doc", 10_000, True), ("doc", 40_000, False)],
)
def test_a_line_of_samples_beyond_a_stated_size_is_left_out(
    key: str, characters: int, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_LINE_BYTES", 100_000)
    monkeypatch.setattr(files, "MOST_BYTES", 20_000)
    good(tmp_path, arguments_bytes=1)
    (samples,) = tmp_path.glob("samples_*.jsonl")
    first, *others = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
    first[key] = {"text": "x" * characters}
    samples.write_text("".join(json.dumps(line) + "\n" for line in [first, *others]), encoding="utf-8")
    assert [line["doc_id"] for line in files.read_lines(samples, files.Notes())] == [0, 1, 2, 3][not read :]
    said = "1 line that is not complete JSON, or longer than 128 MiB (64 MiB without its prompts), left out"
    assert (said in reasons(tmp_path)) is not read


def _first(key: str, *place: int, value: object = 2**63) -> Any:
    def damage(sample: dict[str, Any]) -> None:
        held = sample[key]
        for index in place[:-1]:
            held = held[index]
        if place:
            held[place[-1]] = value
        else:
            sample[key] = value

    return damage


@pytest.mark.parametrize(
    ("task", "damage", "words"),
    [
        (0, _first("nll@0002048", 0, 1), "samples at 2K {} (nll, bits_per_byte)"),
        (0, _first("nll@0002048", 0, 1, value=1.0), "samples at 2K {} (nll, bits_per_byte)"),
        (0, _first("nll@0002048", 0, 2, value=1), "samples at 2K {} (tokens, nll)"),
        (0, _first("nll@0002048", 0, 4, value=1.0), "samples at 2K {} (bits_per_byte)"),
        (0, _first("nll@0002048", 0, 0, value="lib/module_04.py"), "samples at 2K {} (clusters)"),
        (1, _first("position_nll", 9, 0, 1), "samples of positions 257 to 512 {}"),
        (1, _first("position_nll", 9, 0, 2, value=1), "samples of positions 257 to 512 {}"),
        (2, _first("score@0002048"), "samples {} (score@0002048, none)"),
        (3, _first("acc", value=7.0), "samples {} (acc, none)"),
        (3, lambda sample: sample.pop("acc"), "samples {} (acc, none)"),
        (4, _first("f1", value=7.0), "samples {} (f1, none)"),
    ],
)
def test_samples_that_contradict_their_results_are_left_out(task: int, damage: Any, words: str, tmp_path: Path) -> None:
    curve = CURVES["stickbreaking"]
    tasks = [
        perplexity_task("stream", curve),
        position_task(curve),
        ruler_task("sb_ruler_vt", 4000),
        ordinary_task("arc", "acc", 0.5, samples=10),
        ordinary_task("squad", "f1", 0.5, samples=10),
    ]
    path = write_run(tmp_path, model_record("stickbreaking"), tasks)
    content = json.loads(path.read_text())
    content["configs"]["squad"]["metric_list"] = [{"metric": "f1", "aggregation": "mean"}]
    path.write_text(json.dumps(content))
    assert not load_results([tmp_path]).notes
    (file,) = tmp_path.glob(f"samples_{tasks[task][0]}_*.jsonl")
    first, *others = map(json.loads, file.read_text().splitlines())
    damage(first)
    file.write_text("".join(json.dumps(sample) + "\n" for sample in (first, *others)))
    results = load_results([tmp_path])
    words = words.format("do not add up to the results file's numbers and were left out")
    assert [(note.path, note.reason) for note in results.notes] == [(file, f"{words}.")]
    assert (sums_of(results, "demo-sb", tasks[0][0]).lengths == LENGTHS) == (task != 0)
    by_bin = next(iter(results[POSITION_SUMS].values())).sums
    assert ((257, 512) in by_bin, (129, 256) in by_bin) == (task != 1, True)
    for place, metric in ((2, "score@0002048"), (3, "acc"), (4, "f1")):
        assert ((metric, "none") in results[SAMPLE_SCORES]["demo-sb", tasks[place][0]].scores) == (task != place)


def test_means_that_lm_eval_computes_otherwise_are_not_held_against_samples(tmp_path: Path) -> None:
    write_run(tmp_path, None, [ordinary_task("squad", "f1", 0.45, samples=10)])
    assert not load_results([tmp_path]).notes


@pytest.mark.parametrize("recorded", [True, False])
def test_one_line_never_joins_two_sets_of_targets(recorded: bool, tmp_path: Path) -> None:
    """Runs with the same targets are joined; of others, the targets scored at most lengths are kept."""
    runs = [(LENGTHS[:3], "a"), (LENGTHS[3:4], "b"), *([(LENGTHS[4:5], "a")] if recorded else [])]
    for index, (lengths, targets) in enumerate(runs):
        curve = [CURVES["rope"][LENGTHS.index(length)] for length in lengths]
        hashed = {"targets_sha256": targets * 64} if recorded else {}
        task = perplexity_task("fixed_target", curve, lengths=lengths, **hashed)
        write_run(tmp_path / str(index), model_record("rope"), [task], seconds=1_795_000_000.0 + index)
    results = load_results([tmp_path])
    kept = [*LENGTHS[:3], *(LENGTHS[4:5] if recorded else [])]
    assert sorted(results.measurements["context_length_tokens"].dropna().unique()) == kept
    assert sums_of(results, "demo-rope", "sb_stdlib_fixed_target").lengths == kept
    assert [
        note.reason
        for note in results.notes
        if "at 2K is not shown: as far as recorded, it scored other targets" in note.reason
    ]
    (panel,) = perplexity_panels(results.measurements, results.models)
    assert "demo-rope at 2K" in " ".join(panel.remarks)


@pytest.mark.parametrize(("seeds", "shown"), [("aa", 1), ("ab", 0)])
def test_seeds_are_averaged_on_the_same_targets_alone(seeds: str, shown: int, tmp_path: Path) -> None:
    for seed, targets in enumerate(seeds):
        task = perplexity_task("fixed_target", CURVES["rope"], targets_sha256=targets * 64)
        record = model_record("rope", recipe="r", training_seed=seed, checkpoint_sha256=f"{seed}" * 64)
        write_run(tmp_path / str(seed), record, [task])
    pooled = pool_seeds(load_results([tmp_path]))
    assert len(pooled.measurements[pooled.measurements["metric"] == "nll"]) == shown * len(LENGTHS)
    assert bool(shown) != any("on the same targets" in note.reason for note in pooled.notes)
