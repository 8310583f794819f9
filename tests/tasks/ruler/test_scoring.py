"""Scores against NVIDIA's two formulas, written out again, on a table of cases."""

import pytest

from sbeval.tasks.ruler.task import parse_answer, string_match_all, string_match_part

CASES = [
    ("the numbers are 1234567 and 7654321", ["1234567", "7654321"], 1.0, 1.0),
    ("the numbers are 1234567", ["1234567", "7654321"], 0.5, 1.0),
    ("12345678", ["1234567"], 1.0, 1.0),
    ("123456", ["1234567"], 0.0, 0.0),
    ("", ["1234567"], 0.0, 0.0),
    ("NEW YORK city", ["New York", "NYC", "new york city"], 2 / 3, 1.0),
    ("in 1066, they say", ["1066", "1066 AD", "the year 1066"], 1 / 3, 1.0),
    ("abc", ["ABC", "abc", "x", "y"], 0.5, 1.0),
    ("one\ntwo", ["one two"], 0.0, 0.0),
]


@pytest.mark.parametrize(("answer", "references", "share", "any_found"), CASES)
def test_table_of_cases(answer: str, references: list[str], share: float, any_found: float) -> None:
    assert string_match_all(answer, references) == pytest.approx(share)
    assert string_match_part(answer, references) == any_found


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [
        ("  42\n", "42"),
        ("4\x002", "4\n2"),
        ("\x07 42 \x1f", "42"),
        ("a\tb", "a\nb"),
        ("caf\u00e9\x7f", "caf\u00e9\x7f"),
    ],
)
def test_control_characters_become_line_breaks(answer: str, parsed: str) -> None:
    assert parse_answer(answer) == parsed
