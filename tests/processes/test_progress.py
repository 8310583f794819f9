"""One bar over several stages reaches its end with the last stage, and lines above it stay whole."""

import pytest

from sbeval.processes.progress import one_bar, shown_bar


def test_a_bar_moves_within_its_stages_and_ends_with_the_last() -> None:
    places = []
    with one_bar({"first": 3.0, "second": 1.0}) as bar:
        assert shown_bar() is bar
        with bar.stage("first"):
            for _ in range(3):
                bar.advance(0.5)  # a stage that takes more than was planned waits at its end
                places.append(bar._bar.n)
        with bar.stage("second"):
            places.append(bar._bar.n)
        places.append(bar._bar.n)  # a stage that never advances is complete at its end
    assert places == pytest.approx([0.375, 0.75, 0.75, 0.75, 1.0])
    assert shown_bar() is None


def test_lines_printed_while_a_bar_is_shown_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with one_bar({"first": 1.0}) as bar, bar.stage("first"):
        print("a line", flush=True)
        print("another")
    printed = capsys.readouterr()
    assert printed.out == "a line\nanother\n"
    assert "100%" in printed.err
