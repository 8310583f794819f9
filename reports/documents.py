"""Gathers the per-document sums of every setting and perplexity task from its samples files."""

from collections import defaultdict
from collections.abc import Sequence

from sbeval.reports.names import shown_name
from sbeval.reports.notes import Notes
from sbeval.reports.runs import TaskResult
from sbeval.reports.samples import DocumentSums, read_document_sums
from sbeval.reports.settings import Setting


def read_documents(settings: Sequence[Setting], notes: Notes) -> dict[tuple[str, str], DocumentSums]:
    """Returns (setting label, task) to the sums of every source document.

    Runs of one setting at different lengths are joined; where two hold a length, the one that
    `Setting.task_runs` has first counts.
    """
    found: dict[tuple[str, str], DocumentSums] = {}
    counting: dict[tuple[str, str], list[TaskResult]] = defaultdict(list)
    for setting in settings:
        for _, task in setting.task_runs():
            if task.record is not None and task.record.family == "perplexity":
                counting[setting.label, shown_name(task.name)].append(task)
    for key, tasks in counting.items():
        wanted = {length for task in tasks if task.record for length in task.record.lengths}
        parts = []
        for task in tasks:
            lengths = set(task.record.lengths if task.record else ())
            if task.samples is None or not lengths & wanted:
                continue
            sums = read_document_sums(task.samples, notes)
            if sums is not None:
                parts.append(sums)
                wanted -= set(sums.lengths)
        if parts:
            found[key] = DocumentSums.merged(parts)
    return found
