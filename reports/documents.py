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

    Runs of one setting at different lengths are joined; where two hold a length, the newer counts.
    """
    found: dict[tuple[str, str], DocumentSums] = {}
    newest: dict[tuple[str, str], list[TaskResult]] = defaultdict(list)
    for setting in settings:
        for run in setting.runs:
            for task in run.tasks:
                if task.record is not None and task.record.family == "perplexity":
                    newest[setting.label, shown_name(task.name)].append(task)
    for key, tasks in newest.items():
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
