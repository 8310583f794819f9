"""What a reader sees first: the curve, then the cards; sentences and names; differences drawn over length."""

import math
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_files import (
    CURVES,
    LENGTHS,
    model_record,
    perplexity_task,
    reported,
    text_of,
    write_demo_pair,
    write_pair,
    write_run,
)

from sbeval.errors import UserError
from sbeval.reports import build_report, load_results, watch
from sbeval.reports.build import KINDS, READERS
from sbeval.reports.kinds.runs import run_facts
from sbeval.reports.read.fields import first_listed, name_list, quote_name
from sbeval.reports.section import Figure, Report

PARTED = ("stick-breaking", "stick-breaking, extended", "RoPE")


def figure_named(report: Report, words: str) -> Figure:
    return next(figure for section in report.sections for figure in section.figures if words in figure.caption.title)


@pytest.mark.parametrize(("count", "end"), [(4, "d."), (5, "d; 1 more line."), (7, "d; 3 more lines.")])
def test_a_list_of_clauses_counts_the_lines_that_it_leaves_out(count: int, end: str) -> None:
    assert first_listed(list("abcdefg"[:count])) == f"a; b; c; {end}"


def test_the_page_begins_with_the_curve_and_its_differences_and_then_has_the_cards(tmp_path: Path) -> None:
    page = text_of(write_pair(tmp_path / "r", "fixed_target"), "index.html")
    places = [page.index(f'data-figure="f{index}"') for index in (0, 1)]
    assert max(places) < page.index('class="card ') < page.index("Numbers: ")
    contents = re.findall(r'<a href="#([^"]+)">', page[page.index('<nav class="contents"') : page.index("</nav>")])
    assert contents == sorted(contents, key=lambda identifier: page.index(f'id="{identifier}"'))
    assert page.index('id="curves"') < page.index('id="summary"') < page.index('id="curves-more"')


def test_differences_are_drawn_with_their_band_and_zero_at_the_training_length(tmp_path: Path) -> None:
    spec = figure_named(reported(write_pair(tmp_path, "fixed_target")), ": difference").variants["nll"]
    rows = {(row["setting"], row["x"]): row for row in spec["data"]["values"]}
    for attention, label in (("stickbreaking", "demo-sb"), ("rope", "demo-rope")):
        assert rows[label, 1024]["y"] == rows[label, 1024]["low"] == 0
        for length, nll in zip(LENGTHS, CURVES[attention], strict=True):
            row = rows[label, length]
            assert row["y"] == pytest.approx(nll - CURVES[attention][2], abs=0.02)
            assert row["low"] <= row["y"] <= row["high"]
    assert rows["demo-sb", 65536]["high"] < 0 < rows["demo-rope", 65536]["low"]


def test_a_small_difference_stays_visible_beside_a_huge_one(tmp_path: Path) -> None:
    spec = figure_named(reported(write_pair(tmp_path, "fixed_target")), ": difference").variants["nll"]
    scale = spec["layer"][-1]["encoding"]["y"]["scale"]
    (low, high), constant = scale["domain"], scale["constant"]

    def drawn(value: float) -> float:
        return math.copysign(math.log1p(abs(value) / constant), value)

    assert (drawn(0) - drawn(-0.16)) / (drawn(high) - drawn(low)) > 0.15


@pytest.mark.parametrize("documents", [1, 2, 19])
def test_few_documents_get_their_difference_how_many_agree_and_why_no_interval(tmp_path: Path, documents: int) -> None:
    report = reported(write_pair(tmp_path, "fixed_target", documents=documents))
    card = next(finding for finding in report.findings if finding.label == "demo-rope")
    (headline,) = card.headlines
    assert float(headline.value) == pytest.approx(CURVES["rope"][-1] - CURVES["rope"][2], abs=0.05)
    assert "at 64K against 1K" in headline.meaning
    words = card.sentences[0]
    assert "nothing" not in words
    assert "too few for a 95% interval, which needs 20" in words
    assert ("1 document is" if documents == 1 else f"{documents} documents are") in words
    if documents > 1:
        assert f"higher in {documents} of them (by document from +3." in words
    figure = figure_named(report, ": difference")
    assert "No bands" in figure.caption.explanation
    assert all(row["low"] is None for row in figure.variants["nll"]["data"]["values"])


def test_lists_of_names_are_sentences_in_which_a_name_with_a_comma_is_in_quotes(tmp_path: Path) -> None:
    for index, label in enumerate(PARTED):
        curve = CURVES["rope" if label == "RoPE" else "stickbreaking"]
        model = model_record("stickbreaking", name=label, checkpoint_sha256=str(index) * 64)
        write_run(tmp_path / str(index), model, [perplexity_task("fixed_target", curve, seed=index)])
    (sentence,) = reported(tmp_path).overview
    assert sentence == (
        "RoPE breaks past 1K (+3.35 nats at 64K). "
        "stick-breaking and “stick-breaking, extended” improve past 1K (\N{MINUS SIGN}0.16 nats at 64K)."
    )


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters='"'), min_size=1), min_size=1, max_size=6))
def test_as_many_commas_and_ands_stand_outside_quotes_as_a_list_needs(labels: list[str]) -> None:
    outside = re.sub("“.*?”", "x", name_list(labels), flags=re.S)
    assert outside.count(", ") == max(0, len(labels) - 2)
    assert outside.count(" and ") == (len(labels) > 1)
    assert all(quote_name(label) in name_list(labels) for label in labels)


@pytest.mark.parametrize(
    ("lengths", "trained", "ends"),
    [
        ([256, 1024, 16384], 1024, (256, 16384)),
        ([4096, 8192], 2048, (2048, 8192)),
        ([4096, 8192], 1024, (4096, 8192)),
        ([256, 1024], 131_072, (256, 1024)),
        ([1024], 1024, (512, 2048)),
    ],
    ids=["within", "half below", "far below", "far above", "one length"],
)
def test_the_axis_ends_where_the_measurements_do(
    tmp_path: Path, lengths: list[int], trained: int, ends: tuple[int, int]
) -> None:
    model = model_record("rope", training_length_tokens=trained)
    write_run(tmp_path, model, [perplexity_task("stream", [2.0] * len(lengths), lengths=lengths)])
    spec = figure_named(reported(tmp_path), "stream").variants["nll"]
    assert spec["layer"][-1]["encoding"]["x"]["scale"]["domain"] == list(ends)
    marks = [layer["data"]["values"] for layer in spec["layer"] if layer["mark"].get("style") == "mark-line"]
    assert [row["x"] for rows in marks for row in rows] == ([trained] if ends[0] <= trained <= ends[1] else [])


def test_the_longest_input_named_is_the_longest_context_scored(tmp_path: Path) -> None:
    task = perplexity_task("stream", [2.0, 2.1], lengths=[512, 16384])
    write_run(tmp_path, model_record("rope", max_length=1024), [task])
    ((run,),) = (model.runs for model in load_results([tmp_path]).models)
    assert run_facts(run)["longest input"] == "16,384 tokens"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo_pair(folder / "results")
    return build_report([folder / "results"], folder / "report", title="Two small models")


def test_a_report_is_one_page_with_figures_and_a_table_and_refers_to_nothing_outside_itself(report: Path) -> None:
    files = {path.name for path in (report.parent / "figures").iterdir()}
    for ending in ("png", "svg", "pdf"):
        assert f"stdlib-stream-6c6838-nll.{ending}" in files
        assert f"stdlib-fixed_target-6c6838-token_perplexity.{ending}" in files
    assert all((report.parent / "figures" / name).stat().st_size > 1000 for name in files)
    assert report.name == "index.html"
    page = report.read_text(encoding="utf-8")
    markup = page[: page.index('<script type="application/json"')]
    assert 'src="http' not in markup
    assert "<link" not in markup
    assert "default-src 'none'" in markup


def test_the_table_holds_every_measured_number_once(report: Path) -> None:
    table = pd.read_csv(report.parent / "results.csv")
    nll = table[(table["metric"] == "nll") & (table["protocol"] == "stream") & (table["setting"] == "demo-rope")]
    assert nll["context_length_tokens"].tolist() == LENGTHS
    assert nll["value"].to_numpy() == pytest.approx(CURVES["rope"], abs=0.15)
    assert (nll["ci95_low"] < nll["value"]).all()
    assert (nll["value"] < nll["ci95_high"]).all()


@pytest.mark.parametrize(
    ("place", "words"), [(".", "There are no result files of lm-eval"), ("nowhere", "does not exist")]
)
def test_a_folder_without_results_is_one_clear_sentence(tmp_path: Path, place: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        build_report([tmp_path / place], tmp_path / "report")
    assert "\n" not in str(error.value)


def test_a_report_is_rebuilt_only_when_results_appear_or_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    sleeps: list[float] = []
    steps = {
        1: lambda: (tmp_path / "results_1.json").write_text("{}"),
        3: lambda: (tmp_path / "results_2.json").write_text("{}"),
        5: lambda: (tmp_path / "results_2.json").write_text("{ }"),
    }

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        steps.get(len(sleeps), lambda: None)()

    def build() -> Path:
        builds.append(len(sleeps))
        return tmp_path / "index.html"

    monkeypatch.setenv("HOME", str(tmp_path))
    pages = watch(["~"], build, interval_seconds=2.0, sleep=sleep)
    assert [next(pages) for _ in range(3)] == [tmp_path / "index.html"] * 3
    assert (builds, set(sleeps)) == ([1, 3, 5], {2.0})


def test_a_report_is_rebuilt_for_no_other_files_than_results_and_samples(tmp_path: Path) -> None:
    builds: list[int] = []
    steps = iter(
        [
            *("samples_a_2026-11-20T10-00-00.jsonl", "results_1.json", "page/summary.json", "config.json"),
            *("samples_b_2026-11-20T10-00-00.jsonl", "page/index.jsonl", "out_2026-11-20T10-00-00.json", "log.json"),
        ]
    )
    written: list[str] = []

    def sleep(_: float) -> None:
        file = tmp_path / next(steps)
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        written.append(file.name)

    def build() -> None:
        builds.append(len(written))

    with pytest.raises(RuntimeError):  # no steps are left
        for _ in watch([tmp_path], build, sleep=sleep):
            pass
    assert builds == [2, 5, 7]


def test_what_a_kind_of_measurement_needs_is_read() -> None:
    assert {kind.needs for kind in KINDS if kind.needs is not None} <= set(READERS)
