"""What can be checked before a model is loaded: that the corpora some tasks need can be had."""

from collections.abc import Iterable, Mapping
from typing import Any

from sbeval.tasks.ruler.essays import load_essays
from sbeval.tasks.ruler.qa_corpora import load_qa

ESSAY_TASKS = (
    "sb_niah_single_2",
    "sb_niah_single_3",
    "sb_niah_multikey_1",
    "sb_niah_multivalue",
    "sb_niah_multiquery",
)
_FORCED = tuple(f"{task}_forced" for task in ESSAY_TASKS[:3])
GROUPS = {
    "sb_niah": ESSAY_TASKS,
    "sb_niah_forced": _FORCED,
    "sb_ruler": (*ESSAY_TASKS, "sb_ruler_qa_squad", "sb_ruler_qa_hotpot"),
}


def check_corpora(tasks: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Reads the corpora that the named tasks and groups need; they stay in memory for the tasks.

    Args:
        tasks: names of tasks and groups, others than RULER's among them.
        metadata: `essays`, `squad` and `hotpot` name local copies.

    Raises:
        UserError: one cannot be had; the message names what to give, and which tasks need none.
    """
    for name in dict.fromkeys(member for task in tasks for member in GROUPS.get(task, (task,))):
        if name in ESSAY_TASKS or name in _FORCED:
            load_essays(metadata.get("essays"), name)
        elif name == "sb_ruler_qa_squad":
            load_qa("squad", metadata.get("squad"), name)
        elif name == "sb_ruler_qa_hotpot":
            load_qa("hotpotqa", metadata.get("hotpot"), name)
