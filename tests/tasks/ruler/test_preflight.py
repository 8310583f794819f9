"""Corpora are checked by name before anything else, and the check knows every task that needs one."""

from typing import Any

import pytest
from ruler_problems import TASKS

from sbeval.errors import UserError
from sbeval.tasks.ruler.essays import OFFLINE_TASKS
from sbeval.tasks.ruler.preflight import GROUPS, check_corpora


def test_given_corpora_pass(corpora: dict[str, Any]) -> None:
    check_corpora(["sb_ruler", "sb_niah_forced", "hellaswag"], corpora)


@pytest.mark.parametrize(
    ("task", "missing"), [("sb_niah", "essays"), ("sb_ruler", "hotpot"), ("sb_ruler_qa_squad", "squad")]
)
def test_a_missing_one_is_named(corpora: dict[str, Any], task: str, missing: str) -> None:
    with pytest.raises(UserError, match="/no/such/place"):
        check_corpora([task], {**corpora, missing: "/no/such/place"})


def test_tasks_without_corpora_are_those_the_message_names(corpora: dict[str, Any]) -> None:
    named = {name for name in TASKS if name in OFFLINE_TASKS.replace(" and ", ", ").split(", ")}
    assert named == set(TASKS) - set(GROUPS["sb_ruler"])
    check_corpora(named, {})
