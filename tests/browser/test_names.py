"""Names beside the lines of a figure: whole, apart from each other, and at their own lines."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from opened import Opened, browser
from result_files import CURVES, model_record, perplexity_task, write_run

from sbeval.reports import build_report

__all__ = ["browser"]

TEXTS = """() => [...document.querySelectorAll('.chart svg')].flatMap((svg) => {
  const own = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter((text) => {
    const box = text.getBoundingClientRect();
    return box.width && (box.right > own.right + 0.5 || box.left < own.left - 0.5);
  }).map((text) => text.textContent);
})"""
NAMES = """() => [...document.querySelector('#curves .chart').querySelectorAll('g.mark-text text')]
  .filter((text) => text.textContent.startsWith('a model of') && text.getBoundingClientRect().width)
  .map((text) => [text.getBoundingClientRect().top, text.getBoundingClientRect().bottom])
  .sort((one, other) => one[0] - other[0])"""


@pytest.fixture(scope="module")
def alike_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page on five models with long names, whose lines end close to each other but for one."""
    folder = tmp_path_factory.mktemp("alike")
    for index in range(5):
        model = model_record("rope", name=f"a model of long name {index}", checkpoint_sha256=str(index) * 64)
        curve = [value + 0.004 * index + (index == 4) * place for place, value in enumerate(CURVES["alibi"])]
        write_run(folder / "r" / str(index), model, [perplexity_task("fixed_target", curve, seed=index)])
    return build_report([folder / "r"], folder / "report", image_formats=())


@pytest.mark.parametrize("width", [520, 760, 1000, 1400])
def test_no_words_of_a_figure_are_cut_off(browser: Any, alike_path: Path, width: int) -> None:
    opened = Opened(browser, alike_path)
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.wait_for_timeout(600)
    assert opened.page.evaluate(TEXTS) == []
    opened.context.close()


def test_names_beside_lines_do_not_touch_when_a_line_is_hidden(browser: Any, alike_path: Path) -> None:
    opened = Opened(browser, alike_path)
    assert len(opened.page.evaluate(NAMES)) == 5
    opened.page.locator("#curves .legend button").last.click()
    opened.page.wait_for_timeout(400)
    boxes = opened.page.evaluate(NAMES)
    assert len(boxes) == 4
    assert all(upper[1] <= lower[0] + 1 for upper, lower in itertools.pairwise(boxes))
    opened.context.close()


DISTANCES = """() => {
  const chart = document.querySelector('#curves .chart');
  const ends = [...chart.querySelectorAll('g.mark-line path')].filter((path) => path.getTotalLength()).map((path) => {
    return path.getPointAtLength(path.getTotalLength()).matrixTransform(path.getScreenCTM()).y;
  });
  const names = [...chart.querySelectorAll('g.mark-text text')];
  const shown = names.filter((text) => text.textContent.startsWith('a model of') && text.getBoundingClientRect().width);
  return shown.map((text) => {
    const box = text.getBoundingClientRect();
    return Math.min(...ends.map((end) => Math.abs(end - (box.top + box.bottom) / 2)));
  });
}"""


def test_names_go_back_to_their_lines_when_those_around_them_are_hidden(browser: Any, alike_path: Path) -> None:
    opened = Opened(browser, alike_path)
    buttons = opened.page.locator("#curves .legend button")
    assert max(opened.page.evaluate(DISTANCES)) > 10
    for index in (1, 2, 3):
        buttons.nth(index).click()
    opened.page.wait_for_timeout(400)
    for metric in ("token_perplexity", "nll"):
        distances = opened.page.evaluate(DISTANCES)
        assert len(distances) == 2
        assert max(distances) < 4
        opened.page.locator(f".segmented input[value={metric}]").first.check(force=True)
        opened.page.wait_for_selector(f"#curves .chart[data-drawn={metric}]")
    opened.context.close()
