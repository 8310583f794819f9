from pathlib import Path

import pytest

from sbeval.errors import UserError
from sbeval.policy import Rule, read_policy


def test_rules_are_read_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("rules:\n  - {task: ruler, length: mean, largest_change: '0.02'}")
    assert read_policy(tmp_path / "gate.yaml") == (Rule(task="ruler", length="mean", largest_change=0.02),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules:\n  - {task: x, largest_chnage: 1}", "did you mean 'largest_change'"),
        ("rules:\n  - {task: x, largest_change: -1}", "a number of 0 or more"),
        ("rules:\n  - {task: x, length: long, largest_change: 1}", "a positive number of tokens, or mean"),
        ("rules: []", "Expected rules"),
        ("rules: 3", "Expected rules"),
        ("- 1", "settings of a policy"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    with pytest.raises(UserError, match=words) as raised:
        read_policy(tmp_path / "gate.yaml")
    assert "\n" not in str(raised.value)
