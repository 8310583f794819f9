"""What authors print: relative lengths, maps of NLL, claimed and effective lengths, context needed, a paper's files."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from result_files import (
    CURVES,
    LENGTHS,
    RULER_TASKS,
    model_record,
    perplexity_task,
    position_task,
    reported,
    ruler_task,
    write_pair,
    write_run,
)

from sbeval.checkpoints.facts import declared_length_tokens
from sbeval.errors import UserError
from sbeval.models import SbevalConfig
from sbeval.reports import build_report, load_results
from sbeval.reports.figures.lengths import axes_of, on_axis
from sbeval.reports.kinds.needed import context_needed
from sbeval.reports.read.samples import SumsByDocument
from sbeval.reports.section import Section


def section(folder: Path, name: str) -> Section | None:
    return next((one for one in reported(folder).sections if one.identifier == name), None)


def rows_of(spec: Any) -> dict[str, list[float | None]]:
    rows: dict[str, list[float | None]] = {}
    for row in spec["data"]["values"]:
        rows.setdefault(row["setting"], []).append(row["x"])
    return rows


@pytest.fixture
def trained_apart(tmp_path: Path) -> Path:
    """Models trained at 1K and 4K, one extended from 1K to 4K, and one of unknown training length."""
    origin = {"name": "short", "sha256": "0" * 64, "training_length_tokens": 1024}
    facts: dict[str, dict[str, Any]] = {
        "short": {},
        "long": {"training_length_tokens": 4096},
        "extended": {"training_length_tokens": 4096, "extended_from": origin},
        "unknown": {"training_length_tokens": None},
    }
    for place, (name, changes) in enumerate(facts.items()):
        model = model_record("rope", name=name, checkpoint_sha256=f"{place:064x}", **changes)
        write_run(tmp_path / name, model, [perplexity_task("stream", CURVES["rope"])])
    return tmp_path


def test_lengths_count_in_each_model_s_own_training_or_declared_length(trained_apart: Path) -> None:
    curves = section(trained_apart, "curves")
    assert list(curves.axes) == ["tokens", "training", "declared"]
    spec = curves.figures[0].variants["nll"]
    assert rows_of(spec)["long"] == LENGTHS
    trained = {"short": 1024, "long": 4096, "extended": 1024}
    for unit, of_models in (("training", trained), ("declared", {"short": 1024, "extended": 4096})):
        moved = on_axis(spec, unit)
        rows = rows_of(moved)
        assert all(rows[name] == [length / own for length in LENGTHS] for name, own in of_models.items())
        assert rows["unknown"] == [None] * len(LENGTHS)
        marks = [row for layer in moved["layer"] for row in layer.get("data", {}).get("values", ()) if "first" in row]
        assert {row["x"] for row in marks} == {1}
        assert {row["text"] for row in marks} == {f"{unit} length", ""}
        ends = [end["label_x"] for end in moved["datasets"]["ends"] if end["setting"] != "unknown"]
        assert max(ends) <= moved["layer"][-1]["encoding"]["x"]["scale"]["domain"][1]
        assert f"(multiples of the {unit} length" in moved["layer"][-1]["encoding"]["x"]["title"]


def test_an_axis_that_says_nothing_new_is_not_offered(tmp_path: Path) -> None:
    curves = section(write_pair(tmp_path, "stream"), "curves")
    assert list(curves.axes) == ["tokens", "training"]
    spec = curves.figures[0].variants["nll"]
    assert on_axis(spec, "declared") is spec
    assert not axes_of({"usermeta": {}})


@pytest.mark.parametrize(
    ("facts", "declared"),
    [
        ({}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 512}}, 4096),
        ({"declared_length_tokens": 131072, "rope_scaling": {"factor": 8.0}}, 131072),
        ({"training_length_tokens": None}, None),
    ],
)
def test_what_is_declared_is_the_configuration_s_length_or_what_scaling_makes_of_the_training_length(
    facts: dict[str, Any], declared: int | None, tmp_path: Path
) -> None:
    write_run(tmp_path, model_record("rope", **facts), [perplexity_task("stream", CURVES["rope"])])
    assert load_results(tmp_path).models[0].declared_length_tokens == declared


def test_a_default_for_other_software_is_not_what_a_configuration_declares() -> None:
    assert declared_length_tokens(SbevalConfig()) is None
    assert declared_length_tokens(SbevalConfig(training_length_tokens=512, max_position_embeddings=2048)) == 2048


def test_maps_hold_nll_by_position_and_document_and_the_difference_to_the_baseline(tmp_path: Path) -> None:
    for attention in ("stickbreaking", "rope"):
        for longest in (1024, 4096):
            task = position_task(CURVES[attention], longest=longest)
            write_run(tmp_path / attention / str(longest), model_record(attention), [task])
        write_run(tmp_path / attention, model_record(attention), [perplexity_task("fixed_target", CURVES[attention])])
    report = reported(tmp_path)
    maps = next(one for one in report.sections if one.identifier == "maps")
    figures = {figure.image.partition(".")[0]: figure.variants["nll"] for figure in maps.figures}
    assert list(figures) == [
        f"map-{kind}-sb_stdlib_{task}{suffix}"
        for kind, task in (("position", "position"), ("document", "fixed_target"))
        for suffix in ("", "-difference")
    ]
    cells = figures["map-position-sb_stdlib_position"]["concat"][0]["data"]["values"]
    rows = {length: {cell["row"] for cell in cells if cell["length"] == length} for length in ("1K", "4K")}
    assert rows["4K"] - rows["1K"] == {"1K", "2K"}
    (difference,) = figures["map-document-sb_stdlib_fixed_target-difference"]["concat"]
    levels = figures["map-document-sb_stdlib_fixed_target"]["concat"]
    by_place = [{(c["length"], c["row"]): c["value"] for c in image["data"]["values"]} for image in levels]
    for cell in difference["data"]["values"]:
        place = cell["length"], cell["row"]
        assert cell["value"] == pytest.approx(by_place[0][place] - by_place[1][place])
    assert difference["layer"][0]["encoding"]["color"]["scale"]["type"] == "symlog"
    positions = next(one for one in report.sections if one.identifier == "positions")
    drawn = positions.figures[0].variants["nll"]["data"]["values"]
    assert len({(row["setting"], row["x"]) for row in drawn}) == len(drawn)  # one pass alone


def test_a_followed_training_says_when_each_length_begins_to_work(tmp_path: Path) -> None:
    for step, reach in ((100, 1), (200, 2), (400, 4)):
        curve = [2.2 - 0.1 * min(place, reach) for place in range(5)]
        model = model_record("rope", name=f"checkpoint-{step}", checkpoint_sha256=f"{step:064x}")
        task = perplexity_task("fixed_target", curve, lengths=LENGTHS[:5])
        write_run(tmp_path / str(step), model, [task], pretrained=f"runs/rope/checkpoint-{step}")
    drawn = next(figure for figure in section(tmp_path, "steps").figures if figure.image.endswith("-map"))
    assert "512 at step 100, 1K at step 200, 2K at step 400, 4K at step 400" in drawn.caption.finding
    (image,) = drawn.variants["nll"]["concat"]
    marked = {(cell["row"], cell["length"]) for cell in image["data"]["values"] if "\N{LOZENGE}" in cell["text"]}
    assert marked == {("100", "512"), ("200", "1K"), ("400", "2K"), ("400", "4K")}


def sums(nll: np.ndarray, tokens: int = 10) -> SumsByDocument:
    """NLL per token of stretches (three a document) by length."""
    named = [(f"d{row // 3}\0({row}, {row})", values) for row, values in enumerate(nll * tokens)]
    columns = range(nll.shape[1])
    return SumsByDocument({256 << k: {name: np.array([row[k], tokens, 1]) for name, row in named} for k in columns})


def test_the_context_needed_is_the_shortest_that_is_as_good_as_the_longest() -> None:
    steps = np.arange(90) % 4  # the length after which nothing more is gained
    nll = 2.0 + 0.5 * (np.arange(4) < steps[:, None]) + np.where(np.arange(4) == 3, 0, 0.009)
    needed = context_needed(sums(nll), 512)
    assert needed.shares["value"].tolist() == pytest.approx([(steps <= k).mean() for k in range(4)])
    assert needed.beyond[0] == pytest.approx((steps > 1).mean())
    assert needed.beyond[1] < needed.beyond[0] < needed.beyond[2]
    assert (needed.units, set(needed.shares["clusters"])) == (90, {30})
    assert context_needed(sums(nll), 512, within_nats=0.001).shares["value"].tolist() == [0, 0, 0, 1]
    assert context_needed(sums(nll[:9]), 512).shares["ci95_low"].isna().all()
    assert context_needed(sums(nll), None).beyond is None  # type: ignore[union-attr]


def test_needed_context_needs_logged_samples_and_says_whose_are_missing(tmp_path: Path) -> None:
    task = perplexity_task("fixed_target", CURVES["rope"])
    write_run(tmp_path / "a", model_record("rope"), [task], log_samples=False)
    needed = section(tmp_path, "needed")
    assert not needed.figures
    assert "demo-rope: samples were not logged" in needed.remarks[0].text
    write_run(tmp_path / "b", model_record("stickbreaking"), [perplexity_task("fixed_target", CURVES["stickbreaking"])])
    needed = section(tmp_path, "needed")
    assert list(needed.figures[0].variants) == ["stretch", "document"]
    assert needed.remarks


def test_claimed_and_effective_lengths_stand_in_one_table_a_model_with_rule_and_interval(tmp_path: Path) -> None:
    needles = [ruler_task(name, 8192, seed=place, lengths=LENGTHS[2:7]) for place, name in enumerate(RULER_TASKS)]
    falling = perplexity_task("fixed_target", [2.5 - 0.1 * place for place in range(5)], lengths=LENGTHS[:5])
    write_run(tmp_path, model_record("rope", declared_length_tokens=32768), [falling, *needles])
    (table,) = section(tmp_path, "lengths").tables
    shown = {row.cells[0].text: row.cells[1:] for row in table.rows}
    assert [shown[name][0].plain for name in ("declared", "training")] == ["32K", "1K"]
    assert shown["effective, perplexity (Python standard library)"][0].plain == "≥ 4K [≥ 4K, ≥ 4K]"
    for name in ("effective, needles, generated", "effective, RULER"):
        assert re.fullmatch(r"8K \[[248]K, >?(8|16)K\]", shown[name][0].plain)
        assert "85.6%" in shown[name][1].text


@pytest.mark.exhaustive
def test_a_paper_s_figures_have_a_column_s_or_a_page_s_width_no_title_and_names_without_hashes(tmp_path: Path) -> None:
    write_pair(tmp_path / "results", "fixed_target")
    for attention in ("stickbreaking", "rope"):
        task = ruler_task("sb_niah_single_1", 2048)
        write_run(tmp_path / "results" / f"n{attention}", model_record(attention), [task])
    paper = tmp_path / "paper"
    build_report([tmp_path / "results"], tmp_path / "report", image_formats=(), paper=paper, axis="training")
    names = sorted(file.name for file in (paper / "figures").iterdir())
    assert "stdlib-fixed_target-nll.pdf" in names
    widths = {}
    for name in names:
        content = (paper / "figures" / name).read_bytes()
        assert b"Fixed target" not in content
        widths[name] = float(re.search(rb"/MediaBox\s*\[\s*0 0 ([\d.]+)", content)[1])
    assert widths["stdlib-fixed_target-nll.pdf"] == pytest.approx(234, abs=0.5)
    assert widths["needles-niah_single_1.pdf"] == pytest.approx(486, abs=0.5)
    figures, tables = ((paper / name).read_text() for name in ("figures.tex", "tables.tex"))
    assert re.search(r"\[width=3.25in,height=0.8\\textheight[a-z,]*\]\{figures/stdlib-fixed_target-nll.pdf", figures)
    assert figures.count(r"\begin{figure") == len(names)
    assert "Bands: 95" in figures
    assert "60 documents" in figures
    assert not re.search("tikz|pgf", figures + tables, re.IGNORECASE)
    assert r"\resizebox" in tables
    assert re.search(r"& \\begin\{tabular\}\[t\]\{@\{\}r@\{\}\}[\d.]+\\\\\[-2pt\]\{\\scriptsize", tables)
    assert not re.search(r"-[0-9a-f]{6}\b", figures + tables)
    again = [tmp_path / "results"], tmp_path / "report"
    build_report(*again, image_formats=(), paper=paper, figures=["*token_perplexity"])
    assert "token" in (paper / "figures.tex").read_text()
    (paper / "tables.tex").write_text("mine")
    with pytest.raises(UserError, match=r"tables\.tex"):
        build_report(*again, image_formats=(), paper=paper)
    with pytest.raises(UserError, match="Page and paper cannot share the folder"):
        build_report(*again, image_formats=(), paper=tmp_path / "report")


@pytest.mark.exhaustive
def test_a_paper_s_captions_name_intervals_and_documents_only_where_there_are_some(tmp_path: Path) -> None:
    task = perplexity_task("stream", CURVES["rope"], documents=3)
    task[1].update({key: None for key in task[1] if "_ci95" in key or "clusters" in key})
    write_run(tmp_path / "results", model_record("rope"), [task], log_samples=False)
    build_report([tmp_path / "results"], tmp_path / "report", image_formats=(), paper=tmp_path / "paper")
    text = (tmp_path / "paper" / "figures.tex").read_text()
    assert "stream" in text
    assert not re.search("Band|interval|documents?[.]", text)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
@pytest.mark.parametrize("inside", [False, True])
def test_a_paper_s_files_compile_alone_and_inside_a_document(inside: bool, tmp_path: Path) -> None:
    write_pair(tmp_path / "results", "fixed_target", lengths=LENGTHS)
    paper = tmp_path / "paper"
    build_report([tmp_path / "results"], tmp_path / "report", image_formats=(), paper=paper)
    start = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}"
    (paper / "whole.tex").write_text(rf"{start}\input{{figures.tex}}\input{{tables.tex}}\end{{document}}")
    for name in ("whole",) if inside else ("figures", "tables"):
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", name]
        ran = subprocess.run(command, cwd=paper, capture_output=True)
        assert ran.returncode == 0, ran.stdout.decode(errors="replace")[-1500:]
        assert (paper / f"{name}.pdf").stat().st_size > 1000
