from pathlib import Path

import pandas as pd
import pytest
from result_files import CURVES, LENGTHS, write_demo_pair

from sbeval.errors import UserError
from sbeval.reports import build_report, watch


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo_pair(folder / "results")
    return build_report([folder / "results"], folder / "report", title="Two small models")


def test_a_report_is_one_page_with_figures_and_a_table(report: Path) -> None:
    files = {path.name for path in (report.parent / "figures").iterdir()}
    for ending in ("png", "svg", "pdf"):
        assert f"stdlib-stream-6c6838-nll.{ending}" in files
        assert f"stdlib-fixed_target-6c6838-token_perplexity.{ending}" in files
    assert all((report.parent / "figures" / name).stat().st_size > 1000 for name in files)
    assert report.name == "index.html"


def test_the_table_holds_every_measured_number_once(report: Path) -> None:
    table = pd.read_csv(report.parent / "results.csv")
    nll = table[(table["metric"] == "nll") & (table["protocol"] == "stream") & (table["setting"] == "demo-rope")]
    assert nll["context_length_tokens"].tolist() == LENGTHS
    assert nll["value"].to_numpy() == pytest.approx(CURVES["rope"], abs=0.15)
    assert (nll["ci95_low"] < nll["value"]).all()
    assert (nll["value"] < nll["ci95_high"]).all()


def test_the_page_refers_to_nothing_outside_itself(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    markup = page[: page.index('<script type="application/json"')]
    assert 'src="http' not in markup
    assert "<link" not in markup
    assert "default-src 'none'" in markup


@pytest.mark.parametrize(("place", "words"), [(".", "Expected result files of lm-eval"), ("nowhere", "does not exist")])
def test_a_folder_without_results_is_one_clear_sentence(tmp_path: Path, place: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        build_report([tmp_path / place], tmp_path / "report")
    assert "\n" not in str(error.value)


def test_a_report_is_rebuilt_only_when_a_result_file_appears_or_grows(tmp_path: Path) -> None:
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

    pages = watch([tmp_path], build, interval_seconds=2.0, sleep=sleep)
    assert [next(pages) for _ in range(3)] == [tmp_path / "index.html"] * 3
    assert builds == [1, 3, 5]
    assert set(sleeps) == {2.0}
