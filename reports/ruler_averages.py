"""Which settings and tasks one average of RULER may show: lines on one axis are means over the same tasks."""

import dataclasses
from collections.abc import Sequence

import pandas as pd


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alike:
    """Settings averaged over the same tasks.

    Attributes:
        tasks: the tasks averaged.
        scores: the rows of the settings that ran all of them.
        words: what the average is called where it is not over every task asked for.
        explanation: which tasks it is over, and who is left out.
    """

    tasks: tuple[str, ...]
    scores: pd.DataFrame
    words: str
    explanation: str


def averaged_alike(scores: pd.DataFrame, tasks: Sequence[str]) -> list[Alike]:
    """Returns the averages that can be drawn: over all the tasks, and over those every setting ran where these differ.

    Args:
        scores: rows with columns setting and ruler_task.
        tasks: the tasks to be averaged; settings that ran none of them are left aside.
    """
    own = scores[scores["ruler_task"].isin(tasks)]
    ran = {str(setting): frozenset(rows["ruler_task"]) for setting, rows in own.groupby("setting", sort=False)}
    if not ran:
        return []
    found = []
    complete = [setting for setting, names in ran.items() if len(names) == len(tasks)]
    if complete:
        others = [setting for setting in ran if setting not in complete]
        left_out = f" Left out, since they did not run them all: {', '.join(others)}." if others else ""
        count = f"{len(tasks)} tasks" if len(tasks) > 1 else "one task"
        found.append(
            Alike(
                tasks=tuple(tasks),
                scores=own[own["setting"].isin(complete)],
                words="",
                explanation=f"Mean over {count}.{left_out}" if len(tasks) > 1 or left_out else "",
            )
        )
    shared = tuple(task for task in tasks if all(task in names for names in ran.values()))
    if shared and len(shared) < len(tasks):
        count = f"{len(shared)} of {len(tasks)}"
        counted = f"the {count} tasks" if len(shared) > 1 else f"the one of {len(tasks)} tasks"
        everyone = "every model here ran" if len(ran) > 1 else "run"
        found.append(
            Alike(
                tasks=shared,
                scores=own[own["ruler_task"].isin(shared)],
                words=f"{count} {'needle tasks' if all(task.startswith('niah') for task in tasks) else 'tasks'}",
                explanation=f"Mean over {', '.join(shared)}: {counted} {everyone}.",
            )
        )
    return found
