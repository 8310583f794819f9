"""Figures: every specification is valid Vega-Lite and contains the table's numbers."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import fastjsonschema
import pandas as pd
import pytest
import vl_convert
from altair.vegalite.v6.schema.core import load_schema
from experiment_files import mqrar_task, write_everything
from result_files import CURVES, LENGTHS, model_record, perplexity_task, position_task, reported, ruler_task, write_run

from sbeval.errors import UserError
from sbeval.reports import load_results
from sbeval.reports.analyse.panels import perplexity_panels
from sbeval.reports.analyse.statistics import wilson_interval
from sbeval.reports.figures.images import ImageWriter
from sbeval.reports.figures.labels import Caption, end_labels, nice_domain
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look, choose_looks
from sbeval.reports.kinds.curves import curve_figure
from sbeval.reports.kinds.position_sums import PositionBand
from sbeval.reports.kinds.positions import difference_to_baseline
from sbeval.reports.section import Figure, Table
from sbeval.reports.write.html import environment

CAPTION = Caption(title="", finding="")


def _is_level(layer: dict[str, Any]) -> bool:
    return layer["mark"]["type"] == "text" and "right" in layer.get("data", {}).get("values", [{}])[0]


def figures(folder: Path) -> dict[str, Figure]:
    return {figure.caption.title: figure for section in reported(folder).sections for figure in section.figures}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> dict[str, Figure]:
    folder = tmp_path_factory.mktemp("everything")
    write_everything(folder)
    return figures(folder)


@pytest.mark.exhaustive
def test_every_figure_is_valid_vega_lite(everything):
    specs = [spec for figure in everything.values() for spec in figure.variants.values()]
    assert len(specs) > 20
    validate = fastjsonschema.compile(load_schema())  # altair's own check takes half a minute
    for spec in specs:
        validate(spec)


def test_every_value_named_along_an_axis_is_drawn():
    values = (-0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
    axes = Axes(x_title=None, x_domain=(256, 1024), y_title=None, y_scale="symlog", y_values=values, y_format="~g")
    looks = {"a": Look(light="#000000", dark="#ffffff", shape="circle", dashed=False)}
    rows = [{"setting": "a", "x": x, "y": y} for x, y in ((256, -0.15), (1024, 3.4))]
    drawn = vl_convert.vegalite_to_svg(line_figure(rows, CAPTION, axes=axes, looks=looks, tooltip={}))
    labels = re.findall(r">([^<>]+)</text>", drawn.replace("\N{MINUS SIGN}", "-"))
    assert {*labels} >= {f"{value:g}" for value in values}


def test_every_figure_states_its_finding_with_numbers_for_those_who_cannot_see(everything):
    for figure in everything.values():
        assert any(letter.isdigit() for letter in figure.caption.finding)
        for metric, spec in figure.variants.items():
            assert figure.findings.get(metric, figure.caption.finding) in spec["description"]


def points(spec: Any, label: str) -> dict[int, float | None]:
    return {row["x"]: row["y"] for row in spec["data"]["values"] if row["setting"] == label}


def test_a_curve_holds_the_measured_numbers(everything):
    spec = everything["Python standard library, stream"].variants["nll"]
    assert points(spec, "demo-nope") == pytest.approx(dict(zip(LENGTHS, CURVES["nope"], strict=True)), abs=0.15)
    marks = [layer["data"]["values"] for layer in spec["layer"] if layer["mark"].get("style") == "mark-line"]
    assert [row["x"] for row in marks[0]] == [1024]
    x = spec["layer"][0]["encoding"]["x"]
    assert (x["scale"]["domain"], x["scale"]["base"]) == ([256, 65536], 2)


def test_a_length_only_others_have_breaks_the_line_and_is_never_zero(tmp_path):
    write_run(tmp_path / "a", model_record("rope"), [perplexity_task("stream", CURVES["rope"])])
    some = [256, 512, 4096]
    write_run(tmp_path / "b", model_record("stickbreaking"), [perplexity_task("stream", [2.2, 2.1, 1.8], lengths=some)])
    results = load_results([tmp_path])
    (panel,) = perplexity_panels(results.measurements, results.models)
    found = points(curve_figure(panel, "nll", CAPTION, choose_looks(results.models)), "demo-sb")
    assert [length for length, value in found.items() if value is None] == [1024, 2048]
    assert set(found) == {256, 512, 1024, 2048, 4096}


def test_a_heatmap_has_every_cell_with_its_count_and_interval(everything):
    spec = everything["niah_single_1"].variants["score"]
    assert [part["title"]["text"] for part in spec["concat"]] == ["demo-sb", "demo-rope"]
    grid = spec["concat"][1]["vconcat"][1]
    assert len(grid["data"]["values"]) == 11 * 7
    assert grid["layer"][0]["encoding"]["color"]["scale"]["domain"] == [0, 1]
    far = next(cell for cell in grid["data"]["values"] if cell["row"] == 0 and cell["length"] == "16K")
    near = next(cell for cell in grid["data"]["values"] if cell["row"] == 100 and cell["length"] == "16K")
    assert far["value"] < 0.5 < near["value"]
    assert far["samples_text"] == "5"
    assert "%" in far["interval_text"]


def test_the_difference_to_a_baseline_is_taken_bin_by_bin():
    rows = [("a", 1, 8, 3.0), ("a", 9, 16, 2.0), ("b", 1, 8, 3.5), ("b", 9, 16, 1.5), ("b", 17, 32, 1.0)]
    table = pd.DataFrame(rows, columns=["setting", "first", "last", "nll"])
    found = difference_to_baseline(table, "a", {"b": {(1, 8): PositionBand(low=0.4, high=0.6)}})
    assert found[["setting", "first", "nll"]].to_numpy().tolist() == [["b", 1, 0.5], ["b", 9, -0.5]]
    assert found["ci95_low"].tolist() == pytest.approx([0.4, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("os.kill(os.getpid(), 5)", UserError, "ended by signal 5, probably because memory ran out"),
        ("sys.exit('no library')", RuntimeError, r"an image process ended with exit code 1: no library"),
        (
            "print('panicked:\\nFailed to parse text SVG', file=sys.stderr); sys.stderr.flush(); os.abort()",
            RuntimeError,
            r"an image process ended with exit code -6: Failed to parse text SVG",
        ),
    ],
)
def test_a_drawing_process_that_ends_says_why(code, error, words, tmp_path, monkeypatch):
    (tmp_path / "process.py").write_text(f"import os, sys\n{code}")
    monkeypatch.setattr("sbeval.reports.figures.image_process.__file__", str(tmp_path / "process.py"))
    with ImageWriter(tmp_path) as writer:
        writer.publish({}, "figure")
        with pytest.raises(error, match=words):
            writer.svgs()


@pytest.mark.parametrize(
    "letters", ["\N{FIRE}" * 200, "a" + "\N{FIRE}\N{LINEAR B SYLLABLE B008 A}\ue000" * 70, "\N{FIRE}"]
)
def test_a_name_of_emoji_is_cut_between_two_of_them(letters, tmp_path):
    data = {"values": [{"name": letters, "value": 1}]}
    encoding = {"y": {"field": "name", "type": "nominal", "axis": {"labelLimit": 150}}}
    with ImageWriter(tmp_path, ("svg", "png", "pdf")) as writer:
        writer.publish({"data": data, "mark": "bar", "encoding": encoding}, "figure")
        (svg,) = writer.svgs().values()
    (shown,) = re.findall(f">({letters[:2]}[^<]*)</text>", svg)
    assert letters.startswith(shown.removesuffix("\N{HORIZONTAL ELLIPSIS}"))
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8") == svg


def test_text_is_escaped_in_elements_and_attributes_alike():
    template = environment().from_string('<p title="{{ words }}">{{ words }}</p>')
    escaped = "&lt;a href=&#39;x&#39;&gt;&#34;&amp;"
    assert template.render(words="<a href='x'>\"&\N{RIGHT-TO-LEFT OVERRIDE}") == f'<p title="{escaped}">{escaped}</p>'


def tables(folder: Path) -> dict[str, Table]:
    return {table.stem: table for table in reported(folder).tables}


def words(table: Table) -> list[str]:
    return [cell.plain for cells in ((table.header), *table.rows_in_files) for cell in cells]


@pytest.mark.parametrize(
    ("task", "metric", "elsewhere"),
    [
        (ruler_task("sb_niah_single_1", 2000), "retrieval_gain@0001024,none", "score"),
        (mqrar_task(64), "retrieval_gain_32_pairs@0000768,none", "exact_match"),
    ],
)
def test_measures_that_have_no_figure_stand_in_a_table(tmp_path, task, metric, elsewhere):
    name, metrics, metadata, samples = task
    write_run(tmp_path, model_record("stickbreaking"), [(name, {**metrics, metric: 3.25}, metadata, samples)])
    cells = words(tables(tmp_path)[f"beside-{name}"])
    assert {f"demo-sb {metric.partition('@')[0]}", "3.25"} <= set(cells)
    assert not any(elsewhere in text for text in cells)


def test_one_figure_shows_where_the_weight_of_every_model_goes(everything):
    figure = everything["Where the weight goes"]
    panels = {part["title"]["text"]: part["data"]["values"] for part in figure.variants["attention"]["concat"]}
    assert len(panels) == 4
    for name, rows in panels.items():
        softmax = set() if name == "remaining stick" else {"demo-rope"}
        assert {row["setting"] for row in rows} == {"demo-sb"} | softmax
    entropies = {(row["setting"], row["x"]): row["y"] for row in panels["entropy of the weights (nats)"]}
    assert entropies["demo-rope", 4096] == pytest.approx(math.log(4096))
    assert entropies["demo-sb", 4096] == pytest.approx(2.0)
    assert "first token's weight 30.0% to 30.0%" in figure.caption.finding


def test_span_grids_hold_every_head_at_every_length_empty_where_it_has_no_weight(everything):
    spec = everything["demo-sb: span of every head"].variants["span"]
    parts = {part["title"]["text"]: part for part in spec["concat"]}
    assert len(parts) == 5 * 4
    rows = parts["16K: 90%"]["data"]["values"]
    assert len(rows) == 8 * 3
    assert next(row for row in rows if (row["layer"], row["head"]) == (0, 2))["span90"] is None
    assert next(row for row in rows if (row["layer"], row["head"]) == (2, 1))["span90"] == pytest.approx(16384 * 0.9)
    assert len(everything["demo-rope: span of every head"].variants["span"]["concat"]) == 5 * 3


def test_small_multiples_agree_on_colours_and_shapes_where_models_ran_different_tasks(tmp_path):
    vt, fwe = ruler_task("sb_ruler_vt", 4000), ruler_task("sb_ruler_fwe", 4000)
    write_run(tmp_path / "a", model_record("stickbreaking"), [fwe])
    write_run(tmp_path / "b", model_record("rope"), [vt, fwe])
    parts = figures(tmp_path)["RULER, task by task"].variants["score"]["concat"]
    assert len(parts) == 2
    encodings = [layer["encoding"] for part in parts for layer in part["layer"]]
    scales = [drawn[channel]["scale"] for drawn in encodings for channel in ("color", "shape") if channel in drawn]
    assert {tuple(scale["domain"]) for scale in scales} == {("demo-sb", "demo-rope")}


def test_recall_is_drawn_by_number_of_pairs_with_what_counts_as_solved(everything):
    figure = everything["MQRAR, 768 tokens"]
    assert "demo-sb solves up to 160 pairs" in figure.caption.finding
    assert "demo-rope solves up to 64 pairs" in figure.caption.finding
    spec = figure.variants["exact_match"]
    assert [row["x"] for row in spec["data"]["values"] if row["setting"] == "demo-sb"] == [32, 64, 96, 128, 160, 192]
    levels = [layer["data"]["values"] for layer in spec["layer"] if layer["mark"].get("style") == "zero-line"]
    assert [row["y"] for row in levels[0]] == [0.99, 1 / 4096]
    # lines start together at the top left, where they would cover a label
    ends = {layer["data"]["values"][0]["text"]: layer["mark"]["align"] for layer in spec["layer"] if _is_level(layer)}
    assert ends == {"solved, 99%": "right", "chance": "left"}
    assert "demo-rope solves up to 1K" in everything["Flip-flop"].caption.finding


def test_recall_scores_have_wilsons_interval_in_the_table(tmp_path):
    task, metrics, metadata, samples = mqrar_task(1024, pairs=(32, 64), samples=50)
    metrics |= {key: float("stderr" not in key) for key in metrics if key.startswith("exact_match_32")}
    write_run(tmp_path, model_record("stickbreaking"), [(task, metrics, metadata, samples)])
    (table,) = (table for stem, table in tables(tmp_path).items() if stem.startswith("recall-"))
    (cell,) = (cell for row in table.rows for cell in row.cells if cell.text == "100.0%")
    low, high = (f"{float(end):.1%}" for end in wilson_interval(1.0, 50))
    assert cell.interval == (low, high)
    assert f"100.0% [{low}, {high}] (0.001 nats)" in words(table)


def test_phrases_are_drawn_by_their_distance(tmp_path):
    _, metrics, metadata, _ = mqrar_task(1024, pairs=(256, 1024, 4096))
    by_distance = {key.replace("_pairs", "_tokens"): value for key, value in metrics.items()}
    write_run(tmp_path, model_record("stickbreaking"), [("sb_copy_phrase", by_distance, metadata, [])])
    figure = figures(tmp_path)["Copying phrases, 768 tokens"]
    assert "demo-sb solves up to 1,024 tokens back (" in figure.caption.finding
    assert [row["x"] for row in figure.variants["exact_match"]["data"]["values"]] == [256, 1024, 4096]
    (table,) = (table for stem, table in tables(tmp_path).items() if stem.startswith("recall-sb_copy_phrase"))
    assert "4,096 tokens back" in words(table)


def test_positions_show_their_intervals_and_no_last_bin_that_a_window_cuts_short(everything):
    figure = everything["Python standard library: NLL by position"]
    rows = figure.variants["nll"]["data"]["values"]
    assert rows
    for row in rows:
        assert (row["low"], row["high"]) == pytest.approx((row["y"] - 0.1, row["y"] + 0.2))
        assert row["clusters_text"] == "40"
    assert max(row["y"] for row in rows) < 9
    logarithmic = figure.variants["token_perplexity"]["data"]["values"]
    assert [row["high"] for row in logarithmic] == pytest.approx([math.exp(row["high"]) for row in rows])


def position_drawing(tmp_path: Path, *runs: tuple[str, dict[str, Any], bool]) -> tuple[Figure, dict[str, Any]]:
    """Draws the difference of stick-breaking to RoPE; each run's record is changed as given."""
    for attention, changes, by_document in runs:
        name, results, record, samples = position_task(CURVES[attention], by_document=by_document)
        write_run(tmp_path / attention, model_record(attention), [(name, results, {**record, **changes}, samples)])
    figure = figures(tmp_path)["Python standard library: difference to demo-rope"]
    return figure, {row["range_text"]: row for row in figure.variants["nll"]["data"]["values"]}


def test_position_differences_have_a_paired_band_where_enough_documents_were_scored_alike(tmp_path):
    figure, rows = position_drawing(tmp_path, ("stickbreaking", {}, True), ("rope", {}, True))
    assert rows["3 to 4"]["low"] is None
    widest = rows["32,769 to 65,536"]
    # documents keep their level, so the band follows their spread: sqrt(2) * 0.05 / sqrt(40), widened over the bins
    assert 2 * 0.011 < (widest["high"] - widest["low"]) / 2 < 4 * 0.011
    assert widest["low"] < widest["y"] < widest["high"]
    assert "paired by document on identical targets, simultaneous over the positions" in figure.caption.explanation
    assert (
        "No band at some positions for demo-sb: some ranges of positions have targets in fewer than 20 documents."
        in figure.caption.explanation
    )
    assert re.search(r"demo-sb ends 3\.50 nats below demo-rope \(.3\.\d\d to .3\.\d\d\)", figure.caption.finding)


@pytest.mark.parametrize(
    ("changes", "by_document", "reason"),
    [
        ({}, False, "samples of demo-rope were not logged (--log_samples)."),
        ({"lengths": [32768]}, True, "the passes have different lengths."),
    ],
)
def test_position_differences_without_identical_targets_have_no_band_and_say_why(
    tmp_path, changes, by_document, reason
):
    figure, rows = position_drawing(tmp_path, ("stickbreaking", {}, True), ("rope", changes, by_document))
    assert rows
    assert all(row["low"] is None for row in rows.values())
    assert f"No band for demo-sb: {reason}" in figure.caption.explanation


def test_positions_on_two_texts_of_one_name_are_not_drawn_on_one_axis(tmp_path):
    for attention, digest in (("stickbreaking", "aa" * 32), ("rope", "bb" * 32)):
        name, results, record, samples = position_task(CURVES[attention])
        record["corpus_sha256"] = digest
        write_run(tmp_path / attention, model_record(attention), [(name, results, record, samples)])
    found = {title: figure for title, figure in figures(tmp_path).items() if "position" in title}
    assert set(found) == {f"Python standard library ({half * 3}): NLL by position" for half in ("aa", "bb")}


def test_positions_under_scaling_that_follows_the_length_say_which_length_set_it(tmp_path):
    for kind in ("dynamic", "linear"):
        scaled = model_record("rope", name=f"rope-{kind}", rope_scaling={"rope_type": kind, "factor": 4.0})
        write_run(tmp_path / kind, scaled, [position_task(CURVES["rope"])], log_samples=False)
    figure = figures(tmp_path)["Python standard library: NLL by position"]
    sentence = "rope-dynamic: RoPE's base is set for 64K at every position."
    assert figure.caption.explanation == figure.variants["nll"]["title"]["subtitle"] == sentence


def test_names_at_line_ends_keep_their_order_never_overlap_and_stay_above_the_words_of_the_axis():
    whole = {"low": 1.1, "high": 9.7}
    rows = [{"setting": f"m{i}", "x": x, "y": 2.0 + i / 1000, **whole} for i in range(9) for x in (256, 512)]
    ends = end_labels(rows, [f"m{index}" for index in range(9)], "linear", 330, None)
    # the axis goes from 0 to 10, as Vega rounds it, so the lines end near 264 pixels
    heights = [330 * (10 - row["y"]) / 10 + row["shift"] for row in sorted(ends, key=lambda row: -row["y"])]
    assert min(later - earlier for earlier, later in itertools.pairwise(heights)) >= 15 - 1e-9
    assert heights[-1] <= 326
    assert heights[0] < 264 < heights[-1]


@pytest.mark.parametrize(
    ("low", "high", "scale", "ends"),
    [(1.1, 9.7, "linear", (0, 10)), (1.62, 5.41, "linear", (1.5, 5.5)), (3.0, 150.0, "log", (1, 1000))],
)
def test_an_axis_ends_where_vega_ends_it(low, high, scale, ends):
    assert nice_domain(low, high, scale) == pytest.approx(ends)
