import itertools
from pathlib import Path

import pandas as pd
import pytest
from result_files import CURVES, LENGTHS, model_record, perplexity_task, write_run

from sbeval.reports import build_report


def test_a_report_holds_one_number_a_curve_in_its_overview_its_tables_and_a_file(tmp_path: Path) -> None:
    for attention in ("stickbreaking", "rope"):
        task = perplexity_task("fixed_target", CURVES[attention])
        write_run(tmp_path / "results" / attention, model_record(attention), [task])
    folder = build_report([tmp_path / "results"], tmp_path / "report", image_formats=()).parent
    numbers = pd.read_csv(folder / "numbers.csv").set_index(["setting", "metric"])
    for name, attention in (("demo-sb", "stickbreaking"), ("demo-rope", "rope")):
        beyond = CURVES[attention][2:]
        middles = [(left + right) / 2 - beyond[0] for left, right in itertools.pairwise(beyond)]
        change = numbers.loc[(name, "nll_change")]
        assert change["value"] == pytest.approx(sum(middles) / len(middles), abs=0.02)
        assert change["ci95_low"] < change["value"] < change["ci95_high"]
        assert (change["from_tokens"], change["to_tokens"]) == (1024, LENGTHS[-1])
    assert numbers.loc[("demo-rope", "effective_nll_length")]["ci95_high"] == 1024
    summary = (folder / "summary.md").read_text()
    assert "1K \\[1K, 1K\\]" in summary
    assert len(list((folder / "latex").glob("numbers-nll.tex"))) == 1
    assert "One number a curve" in (folder / "index.html").read_text()
