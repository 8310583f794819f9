"""The table of another package's classes, and how their kernels are run without being tuned."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from triton import Config
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from research.other_models import fla_table
from research.other_models.fla_table import NOT_FINISHED, Row, outcome, read, table, with_table
from research.other_models.untuned import stop_tuning

SAID = st.sampled_from(["8.38, 8.40", "no: ImportError: install flash-attn", "no: other", f"{NOT_FINISHED} in 9 s"])


def write(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row._asdict()) + "\n" for row in rows))
    return path


def row(name: str, scored: str, generated: str) -> Row:
    return Row(name, "", "", scored, generated, 1, "here")


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prune_configs", "_bench", "do_bench"):
        monkeypatch.setattr(Autotuner, name, vars(Autotuner)[name])
    stop_tuning()


def test_a_kernel_runs_in_the_first_configuration_that_fits_and_is_compiled_in_no_later_one(untuned: None) -> None:
    tried: list[tuple[int, int]] = []

    def launch(size: int, *, block: int, **options: Any) -> None:
        tried.append((size, block))
        if block > 2 * size:
            raise OutOfResources(required=block, limit=size, name="shared memory")

    fn = SimpleNamespace(fn=lambda size, block: None, run=launch)
    configs = [Config({"block": block}) for block in (64, 16, 8, 4)]
    kernel = Autotuner(fn, ["size", "block"], configs, ["size"], None, None)
    kernel.run(8)
    assert tried == [(8, 64), (8, 16), (8, 16)]
    kernel.run(8)
    kernel.run(2)
    assert tried[3:] == [(8, 16), (2, 64), (2, 16), (2, 8), (2, 4), (2, 4)]


@given(st.lists(st.tuples(SAID, SAID), min_size=1, max_size=4))
def test_a_class_takes_the_best_of_its_runs_and_stands_in_one_line(
    tmp_path_factory, runs: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    files = [write(folder / str(i), row("GLA", *said), row("ABC", "1.0", "1.0")) for i, said in enumerate(runs)]
    found = read(files)
    assert [one.name for one in found] == ["ABC", "GLA"]
    for column, said in (("scored", [run[0] for run in runs]), ("generated", [run[1] for run in runs])):
        best = getattr(found[1], column)
        assert best in said
        ran, finished = any(one[0].isdigit() for one in said), any(not one.startswith(NOT_FINISHED) for one in said)
        assert (outcome(best) == "yes") == ran
        assert (outcome(best) == NOT_FINISHED) == (not finished)
    assert [line.count("GLA") for line in table(found).splitlines()].count(1) == 1


def test_packages_that_are_missing_are_named_in_few_words() -> None:
    assert outcome("no: ImportError: Please install Flash Attention via `pip install flash-attn`") == "needs flash-attn"
    assert outcome("no: RuntimeError: Install `mamba_ssm` with Mamba-3 support.") == "needs mamba_ssm"
    assert outcome("no: AssertionError: something else") == "AssertionError: something else"


def test_the_page_holds_what_the_kept_rows_say() -> None:
    page = fla_table.PAGE.read_text(encoding="utf-8")
    assert with_table(page, read([fla_table.ROWS])) == page
    with pytest.raises(SystemExit, match="put them where the table goes"):
        with_table("no marks", [])
