"""The report in a real browser (Debian's chromium through playwright); run by naming this folder to pytest."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiment_files import write_everything
from opened import Opened, browser

from sbeval.reports import build_report

__all__ = ["browser"]
LINES = "document.querySelector('#curves .chart').querySelectorAll('g.mark-line path').length"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    write_everything(folder / "results")
    return build_report([folder / "results"], folder / "report", image_formats=())


@pytest.fixture
def opened(browser: Any, page_path: Path) -> Iterator[Opened]:
    one = Opened(browser, page_path, offline=True)
    yield one
    one.context.close()


def drawn_lines(page: Any) -> int:
    return int(page.evaluate(LINES))


def test_the_page_loads_offline_without_complaints_and_asks_the_network_for_nothing(opened: Opened) -> None:
    page = opened.page
    for position in range(0, page.evaluate("document.documentElement.scrollHeight"), 600):
        page.evaluate(f"window.scrollTo(0, {position})")
        page.wait_for_timeout(50)
    shown = page.locator("section > .panels > figure > .chart")
    for index in range(shown.count()):
        shown.nth(index).locator("svg").first.wait_for()
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_legend_hides_a_line_and_shows_it_again(opened: Opened) -> None:
    page = opened.page
    button = page.locator("#curves .legend button", has_text="demo-rope").first
    before = drawn_lines(page)
    assert before == 2
    button.click()
    page.wait_for_function(
        "document.querySelectorAll('#curves .chart')[0].querySelectorAll('g.mark-line path').length == 1"
    )
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    page.wait_for_function(
        "document.querySelectorAll('#curves .chart')[0].querySelectorAll('g.mark-line path').length == 2"
    )
    assert button.get_attribute("aria-pressed") == "true"


def test_a_hidden_line_stays_hidden_when_the_metric_changes(opened: Opened) -> None:
    page = opened.page
    page.locator("#curves .legend button", has_text="demo-rope").first.click()
    page.get_by_text("Perplexity", exact=True).first.click()
    page.wait_for_selector("#curves .chart[data-drawn=token_perplexity]")
    assert drawn_lines(page) == 1


def test_the_switch_changes_the_axis(opened: Opened) -> None:
    page = opened.page
    chart = page.locator("#curves .chart").first
    assert "NLL (nats per token)" in chart.text_content()
    page.get_by_text("Perplexity", exact=True).first.click()
    page.wait_for_selector("#curves .chart[data-drawn=token_perplexity]")
    assert "perplexity per token (log scale)" in chart.text_content()
    page.get_by_text("Bits per byte", exact=True).first.click()
    page.wait_for_selector("#curves .chart[data-drawn=bits_per_byte]")
    assert "bits per byte" in chart.text_content()


def test_a_point_tells_its_numbers_under_the_pointer(opened: Opened) -> None:
    page = opened.page
    chart = page.locator("#curves .chart").first
    chart.scroll_into_view_if_needed()
    point = chart.locator("g.mark-symbol path").first
    point.hover(force=True)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    words = tooltip.text_content()
    shown, hovered = tooltip.bounding_box(), point.bounding_box()
    assert abs(shown["x"] - hovered["x"]) < 250
    assert abs(shown["y"] - hovered["y"]) < 250
    assert "scored tokens" in words
    assert re.search(r"\d\.\d{3} to \d\.\d{3}", words)
    assert "documents" in words


def test_a_heatmap_cell_tells_its_count_and_interval(opened: Opened) -> None:
    page = opened.page
    chart = page.locator("#needles .chart").first
    chart.scroll_into_view_if_needed()
    chart.locator("svg").wait_for()
    chart.locator("g.mark-rect path").nth(3).hover(force=True)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    words = tooltip.text_content()
    assert "samples" in words
    assert re.search(r"\d+\.\d% to \d+\.\d%", words)


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(browser: Any, page_path: Path, scheme: str) -> None:
    opened = Opened(browser, page_path, color_scheme=scheme)
    page = opened.page
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    html = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,p,a,td,th,caption,.legend button,.big span,summary')]"
        ".map(e => [e.tagName, getComputedStyle(e).color])"
    )
    chart = page.evaluate(
        "[...document.querySelectorAll('#curves .chart svg text')].map(e => [e.textContent, getComputedStyle(e).fill])"
    )
    weak = {(words, colour) for words, colour in [*html, *chart] if contrast(colour, paper) < 4.5}
    assert weak == set()
    opened.context.close()


def test_a_phone_shows_everything_without_sideways_scrolling(browser: Any, page_path: Path) -> None:
    opened = Opened(browser, page_path)
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(600)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("#curves .chart svg").first.bounding_box()
    assert box["width"] <= 390
    assert box["width"] > 280
    opened.context.close()


def test_paper_shows_still_pictures_in_place_of_live_ones(opened: Opened) -> None:
    page = opened.page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("#curves .chart").first.is_hidden()
    assert page.locator("#curves img.static").first.is_visible()
    assert page.locator(".controls").first.is_hidden()
    assert luminance(page.evaluate("getComputedStyle(document.querySelector('h2')).color")) < 0.1


def test_without_scripts_the_still_pictures_are_there(browser: Any, page_path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_path.as_uri())
    image = page.locator("#curves img.static").first
    assert image.is_visible()
    assert "goes from" in image.get_attribute("alt")
    context.close()


def test_the_keyboard_reaches_summary_links_switch_and_legend_in_reading_order(opened: Opened) -> None:
    page = opened.page
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.value"))
    wanted = ["Skip to the summary", "Summary", "nll", "demo-sb", "demo-rope"]
    places = [next(index for index, words in enumerate(reached) if words == one) for one in wanted]
    assert places == sorted(places)


def test_a_figure_that_cannot_be_drawn_keeps_its_still_picture(browser: Any, page_path: Path) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.add_init_script(
        "Object.defineProperty(window, 'vegaEmbed', { set() {}, get: () => () => Promise.reject(new Error('no')) });"
    )
    page = context.new_page()
    page.goto(page_path.as_uri())
    page.wait_for_function("document.documentElement.classList.contains('js')")
    page.wait_for_timeout(300)
    assert page.locator("#curves .chart[data-drawn]").count() == 0
    assert page.locator("#curves img.static").first.is_visible()
    context.close()


def test_a_drawn_figure_takes_the_place_of_its_still_picture(opened: Opened) -> None:
    assert not opened.page.locator("#curves img.static").first.is_visible()


def test_names_beside_lines_neither_touch_nor_stand_on_the_axis(opened: Opened) -> None:
    chart = opened.page.locator("#curves .chart").first
    boxes = [chart.locator("g.mark-text text", has_text=name).last.bounding_box() for name in ("demo-sb", "demo-rope")]
    upper, lower = sorted(boxes, key=lambda box: box["y"])
    assert upper["y"] + upper["height"] <= lower["y"] + 1


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)], ids=["wide", "phone"])
def test_the_first_screen_shows_the_curve(browser: Any, page_path: Path, width: int, height: int) -> None:
    opened = Opened(browser, page_path)
    opened.page.set_viewport_size({"width": width, "height": height})
    opened.page.wait_for_timeout(600)
    lines = opened.page.locator("#curves .chart").first.locator("g.mark-line path")
    boxes = [lines.nth(index).bounding_box() for index in range(lines.count())]
    assert len(boxes) >= 2
    assert max(box["y"] + box["height"] for box in boxes) < height
    assert opened.page.locator(".card").first.bounding_box()["y"] > max(box["y"] for box in boxes)
    opened.context.close()


def test_lengths_can_count_in_training_lengths(opened: Opened) -> None:
    chart = opened.page.locator("#curves .chart").first
    opened.page.get_by_text("\N{MULTIPLICATION SIGN} training length", exact=True).first.click()
    opened.page.wait_for_selector("#curves .chart[data-axis=training]")
    assert "multiples of the training length" in chart.text_content()


def test_the_words_below_a_figure_follow_the_metric(opened: Opened) -> None:
    page = opened.page
    words = page.locator("#curves .finding").first
    assert words.text_content().startswith("NLL: demo-sb goes from ")
    page.get_by_text("Perplexity", exact=True).first.click()
    page.wait_for_selector("#curves .chart[data-drawn=token_perplexity]")
    assert words.text_content().startswith("Perplexity: demo-sb goes from ")
    chosen = page.locator("#curves .metrics input:checked")
    assert {chosen.nth(index).get_attribute("value") for index in range(chosen.count())} == {"token_perplexity"}
