import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from experiment_files import write_everything, write_extensions
from result_files import CURVES, LENGTHS, model_record, ordinary_task, perplexity_task, text_of, write_run

from sbeval.errors import unseen
from sbeval.reports import build_report
from sbeval.reports.gate import compare
from sbeval.reports.kinds.suite import published_tables
from sbeval.reports.write.exports import latex_text, markdown_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("exports")
    write_everything(base / "results")
    write_extensions(base / "results" / "extension", schemes=["scheme_rope"])
    return build_report([base / "results"], base / "report", image_formats=()).parent


@pytest.mark.exhaustive
def test_parquet_and_csv_hold_the_same_table_of_the_same_types_whatever_was_measured(
    folder: Path, tmp_path: Path
) -> None:
    csv, parquet = pd.read_csv(folder / "results.csv"), pd.read_parquet(folder / "results.parquet")
    assert csv.columns.tolist() == parquet.columns.tolist()
    assert csv["value"].to_numpy() == pytest.approx(parquet["value"].to_numpy())
    write_run(tmp_path / "r", None, [ordinary_task("piqa", "acc", 0.5)])
    small = build_report([tmp_path / "r"], tmp_path / "report", image_formats=()).parent
    full, few = (pq.read_schema(path / "results.parquet").remove_metadata() for path in (folder, small))
    assert few.equals(full)
    assert str(few.field("higher_is_better").type) == "bool"
    assert str(few.field("targets_per_window").type) == "int64"


@pytest.mark.exhaustive
def test_the_summary_states_how_far_context_helps_and_where_it_hurts(folder: Path) -> None:
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    lines = {name: line for line in summary.splitlines() for name in re.findall(r"^- \*\*(.*?)\*\*", line)}
    assert re.search(r"more context lowers NLL (up to (16|32)K|all the way to 64K)", lines["demo-sb"])
    assert "no length up to 64K is measurably worse than 1K, and a rise" in lines["demo-sb"]
    number = "\N{MINUS SIGN}[0-9.]+"
    step = rf"\(from 512: {number} \\\[{number}, {number}\\\]\)"
    worse = "from 2K on, NLL is above its value at 1K"
    assert re.search(f"more context lowers NLL up to 1K {step}; {worse}", lines["demo-rope"])
    assert "samples were not logged" in lines["demo-alibi"]
    assert "this alone does not show that context is used" in lines[r"scheme\_rope-4k"]
    effective = r"Effective length on RULER: &lt;256 \\\[&lt;256, \S+\\\] at the benchmark's threshold of 85\.6%"
    assert re.search(effective, lines["demo-sb"])
    assert "of its own short-context score over all 13 tasks." in lines["demo-sb"]


def test_markdown_tables_have_as_many_cells_in_every_row(folder: Path) -> None:
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", (folder / "summary.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(blocks) >= 6
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.strip().splitlines()}) == 1


def test_latex_tables_are_whole_and_escaped(folder: Path) -> None:
    files = sorted((folder / "latex").glob("*.tex"))
    assert {"ruler.tex", "tasks.tex", "speed.tex"} <= {file.name for file in files}
    for file in files:
        content = file.read_text(encoding="utf-8")
        assert content.count(r"\begin{") == content.count(r"\end{") == 2
        for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
            assert content.count(rule) == 1
        body = content.split(r"\midrule")[1].split(r"\bottomrule")[0]
        columns = content.split(r"\begin{tabular}{")[1].split("}")[0]
        for row in body.strip().splitlines():
            assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1
    assert r"\textbf{0.3320}" in (folder / "latex" / "tasks.tex").read_text(encoding="utf-8")


def test_every_table_of_the_page_is_in_the_summary_and_in_latex(folder: Path) -> None:
    page = html.unescape((folder / "index.html").read_text(encoding="utf-8"))
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    latex = "".join(file.read_text(encoding="utf-8") for file in (folder / "latex").glob("*.tex"))
    captions = re.findall(r"<caption>(.*?)<", page)
    assert len(captions) > 10
    for caption in captions:
        assert f"**{markdown_text(caption)}" in summary
        assert rf"\caption{{{latex_text(caption)}" in latex


def test_a_number_on_the_page_stands_in_the_summary_with_its_interval(folder: Path) -> None:
    page = (folder / "index.html").read_text(encoding="utf-8")
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    cells = re.findall(r"<td(?: class=\"(?:better|worse)\")?>([-+.\d]+)<small>([-+.\d]+) to ([-+.\d]+)</small>", page)
    assert len(cells) > 50
    for value, low, high in cells:
        assert markdown_text(f"{value} [{low}, {high}]") in summary


def test_special_characters_are_text_in_latex_and_markdown_and_no_cell_is_a_command() -> None:
    assert latex_text(r"a_b & 50% \x {y}") == r"a\_b \& 50\% \textbackslash{}x \{y\}"
    assert markdown_text("<b>|`x`* [y](z)\nnext") == r"&lt;b&gt;\|\`x\`\* \[y\](z) next"
    assert markdown_text("$a$ &lt; @team") == r"\$a\$ &amp;lt; &#64;team"
    assert latex_text("[0.1, -0.2]") == "{[}0.1, $-$0.2]"
    assert latex_text("*x --limit `2`") == r"{*}x -{}-limit \textasciigrave{}2\textasciigrave{}"
    assert (latex_text("---"), latex_text("llama-3-8b"), latex_text("é")) == ("-{}-{}-", "llama-3-8b", "é")
    assert latex_text("\N{ROCKET}") == "\\ifdefined\\Umathchar \N{ROCKET}\\else U+1F680\\fi{}"


def test_a_spreadsheet_runs_no_name_as_a_formula(tmp_path: Path) -> None:
    names = ['=HYPERLINK("http://x")', "+1", "-1", "@SUM(A1)"]
    for index, name in enumerate(names):
        model = model_record("rope", name=name, checkpoint_sha256=str(index) * 64)
        write_run(tmp_path / "r" / str(index), model, [ordinary_task(f"{name}task", "acc", -0.5)])
    folder = build_report([tmp_path / "r"], tmp_path / "report", image_formats=()).parent
    table = pd.read_csv(folder / "results.csv")
    assert set(table["setting"]) == {f"'{name}" for name in names}
    assert (set(table["task"]), set(table["value"])) == ({f"'{name}task" for name in names}, {-0.5})
    assert set(pd.read_parquet(folder / "results.parquet")["setting"]) == set(names)


@pytest.mark.exhaustive
def test_a_caption_names_what_brackets_hold_only_where_there_are_some(tmp_path: Path) -> None:
    for documents in (5, 60):
        for attention in ("rope", "stickbreaking"):
            task = perplexity_task("fixed_target", CURVES[attention][:5], lengths=LENGTHS[:5], documents=documents)
            if documents == 5:  # too few: the run wrote no interval
                task[1].update({key: None for key in task[1] if "_ci95" in key})
            write_run(tmp_path / str(documents) / attention, model_record(attention), [task])
        report = build_report([tmp_path / str(documents)], tmp_path / f"report{documents}", image_formats=())
        summary = report.with_name("summary.md").read_text()
        assert [words in summary for words in (r"95% interval\]", r"95% band\]")] == [documents > 5] * 2


def test_no_name_in_a_file_or_a_comparison_acts_on_a_terminal(tmp_path: Path) -> None:
    acting = "\x1b]0;title\x07\N{RIGHT-TO-LEFT OVERRIDE}\x9b\nforged"
    for label, value in (("a", 0.5), ("b", 0.6)):
        task = ordinary_task(f"piqa{acting}", "acc", value, samples=40)
        record = model_record("rope", name=label, checkpoint_sha256=label * 64)
        write_run(tmp_path / label / f"r{acting}", record, [task])
    named = json.dumps(acting)[1:-1]
    for file in tmp_path.rglob("*.json*"):
        file.write_text(re.sub('acc,none|"filter": "none', lambda key: key[0] + named, file.read_text()))
    page = build_report([tmp_path], tmp_path / "report", image_formats=())
    written = [file.read_text() for file in page.parent.rglob("*") if file.suffix in (".md", ".csv", ".tex")]
    lines = compare("a", "b", paths=[tmp_path]).text().splitlines()
    assert not any(line.startswith("forged") for line in lines)
    written += lines
    assert [letter for text in written for letter in text if letter not in "\n\t" and unseen(letter)] == []


@pytest.mark.exhaustive
def test_many_models_stand_side_by_side_before_each_ones_words(tmp_path: Path) -> None:
    for index in range(7):
        attention = ("stickbreaking", "rope")[index % 2]
        model = model_record(attention, name=f"m{index}", checkpoint_sha256=str(index) * 64)
        curve = [value - 0.01 * place for place, value in enumerate(CURVES[attention])]
        write_run(tmp_path / "r" / str(index), model, [perplexity_task("fixed_target", curve, seed=index)])
    folder = build_report([tmp_path / "r"], tmp_path / "report", image_formats=()).parent
    sentence = "m1, m3 and m5 break past 1K ("
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert sentence in page
    assert "<summary>Each of the 7 models in words</summary>" in page
    assert page.index(sentence) < page.index("On identical targets, side by side") < page.index("Each of the 7 models")
    assert sentence in (folder / "summary.md").read_text(encoding="utf-8")
    assert "nowhere measurably up to 64K" in (folder / "latex" / "overview.tex").read_text(encoding="utf-8")


class Structure(HTMLParser):
    """What a screen reader goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.tables = self.captions = 0
        self.images_without_words: list[str] = []
        self.identifiers: list[str] = []
        self.targets: list[str] = []
        self.header_cells_without_scope = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.tables += tag == "table"
        self.captions += tag == "caption"
        if tag == "img" and not found.get("alt"):
            self.images_without_words.append(str(found))
        if tag == "th" and "scope" not in found:
            self.header_cells_without_scope += 1
        if found.get("id"):
            self.identifiers.append(str(found["id"]))
        if tag == "a" and str(found.get("href")).startswith("#"):
            self.targets.append(str(found["href"])[1:])


def test_the_page_can_be_read_by_its_structure_alone(folder: Path) -> None:
    structure = Structure()
    structure.feed((folder / "index.html").read_text(encoding="utf-8"))
    assert (structure.headings[0], structure.headings.count(1)) == (1, 1)
    steps = zip(structure.headings, structure.headings[1:], strict=False)
    assert all(later - earlier <= 1 for earlier, later in steps)
    assert structure.tables == structure.captions > 5
    assert (structure.images_without_words, structure.header_cells_without_scope) == ([], 0)
    assert len(structure.identifiers) == len(set(structure.identifiers))
    assert set(structure.targets) <= set(structure.identifiers)


def test_every_run_is_in_the_provenance_with_its_file(folder: Path) -> None:
    page = (folder / "index.html").read_text(encoding="utf-8")
    provenance = page[page.index('id="provenance"') :]
    for words in ("checkpoint hash", "bfloat16", "triton 3.7.1", "NVIDIA H100", "BOS text", "seed 1234", "lm_eval --m"):
        assert words in provenance
    links = set(re.findall(r'href="(\.\./results/[^"]+results_[^"]+\.json)"', provenance))
    assert len(links) == 8
    assert all((folder / link).resolve().is_file() for link in links)


def test_the_command_is_the_recorded_one_where_the_file_keeps_it(tmp_path: Path) -> None:
    command = "sbeval run --model_args pretrained=x,token=*** --tasks sb_stdlib"
    for name, kept in (("kept", command), ("older", None)):
        model = model_record("rope", name=name, checkpoint_sha256=name.ljust(64, "0"), command=kept)
        write_run(tmp_path / "r" / name, model, [ordinary_task("piqa", "acc", 0.5)])
    page = text_of(tmp_path / "r", "index.html")
    assert f"<dt>command</dt><dd>{command}</dd>" in page
    assert page.count("<dt>command</dt>") == page.count("<dt>command, rebuilt</dt>") == 1


def test_the_papers_tables_stand_beside_all_that_was_measured_of_them(tmp_path: Path) -> None:
    normalised = {"arc_challenge": 0.2, "arc_easy": 0.4, "hellaswag": 0.3, "openbookqa": 0.3}
    plain = {"piqa": 0.6, "race": 0.3, "sciq": 0.5, "winogrande": 0.5}
    tasks = [ordinary_task(name, "acc_norm", value) for name, value in normalised.items()]
    tasks += [ordinary_task(name, "acc", value) for name, value in plain.items()]
    write_run(tmp_path / "r", model_record("stickbreaking"), tasks)
    build_report([tmp_path / "r"], tmp_path / "report", image_formats=())
    second, fifth = published_tables(pd.read_parquet(tmp_path / "report" / "results.parquet"))
    assert second.columns[-1] == "Avg."
    assert second.published["1B Stick-breaking"]["Avg."] == 59.5
    assert second.measured["demo-sb"]["Avg."] == pytest.approx(38.75)
    assert fifth.columns == ("ARC", "HellaSwag", "OBQA", "PIQA", "WinoGrande")
    assert fifth.published["28.6B Softmax"]["ARC"] == 76.8
    assert fifth.measured["demo-sb"]["ARC"] == pytest.approx(30.0)
