"""`sbeval inspect`, one step after another: describe, add up memory, count requests, estimate time."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sbeval.checkpoints.facts import KvExpand
from sbeval.commands.run import Asked, asked, parse
from sbeval.errors import UserError
from sbeval.foreign_files import read_json_object
from sbeval.inspection.description import Description, describe
from sbeval.inspection.duration import Duration, by_results, by_running
from sbeval.inspection.memory import lengths_shown, longest_tokens, memory_here, needs, read_memory
from sbeval.inspection.text import Inspection, Room
from sbeval.inspection.work import Encode, ShareWindows, TaskWork, count_work, make_tasks
from sbeval.settings import Lengths, Limit, as_counts, read_value

BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Most tokens of a batch, as the model adapter has them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked beside the checkpoint's description.

    Attributes:
        memory: of a GPU, such as "80GiB"; None takes what this machine has.
        lengths: to show memory for, such as "4096,65536".
        dtype: to load the weights in.
        kv_expand: how dolomite's grouped heads share keys and values.
        tasks: names as `--tasks` has them.
        metadata: options as `--metadata` has them.
        model_args: arguments of the model beside its name, as `--model_args` has them.
        limit: documents of each task.
        measured: a results file whose tokens a second count.
        measure: whether some documents are run to find out.
    """

    memory: str | None = None
    lengths: str | None = None
    dtype: str = "auto"
    kv_expand: KvExpand = "auto"
    tasks: str | None = None
    metadata: str | None = None
    model_args: str | None = None
    limit: float | None = None
    measured: Path | None = None
    measure: bool = False


def inspect(
    checkpoint: str,
    question: Question,
    *,
    check: Callable[[Asked], bool],
    share: Callable[..., Any],
    started: float | None = None,
) -> Inspection:
    """Finds out what is asked of a checkpoint.

    Args:
        checkpoint: a folder or a hub id.
        question: what is asked.
        check: raises a `UserError` for tasks that cannot run, and returns whether lm-eval's own are needed.
        share: the adapter's `share_windows`.
        started: when the command began, of `time.perf_counter`; None for now.

    Raises:
        UserError: the checkpoint cannot be read, or the question cannot be answered.
    """
    started = time.perf_counter() if started is None else started
    memory_bytes = None if question.memory is None else read_memory(question.memory)
    asked_for = () if question.lengths is None else read_value(Lengths, question.lengths, name="--lengths")
    if question.limit is not None:
        read_value(Limit, question.limit, name="--limit")
    if question.tasks is None and (question.measured or question.measure):
        raise UserError("Expected --tasks with --measured or --measure, found none: name the tasks to estimate.")
    if question.measured and question.measure:
        raise UserError("Expected --measured or --measure, found both: leave one out.")
    if question.measured is not None:
        read_json_object(
            question.measured, "a results file of lm-eval"
        )  # before tasks are made, which can take minutes
    described = describe(checkpoint, dtype=question.dtype, kv_expand=question.kv_expand)
    run = None if question.tasks is None else _asked(checkpoint, question)
    if run is not None and not asked_for:
        asked_for = as_counts(run.metadata["context_lengths"]) if "context_lengths" in run.metadata else ()
    found = _with_memory(described, memory_bytes, asked_for)
    if run is None or described.sizes is None:
        return found
    needed = check(run)
    tasks = make_tasks(run.tasks, run.metadata, folders=run.folders, limit=question.limit, packaged=not needed)
    encode = Encode(str(run.model_args.get("tokenizer") or described.folder))

    longrope = str(run.model_args.get("extrapolation")).startswith("longrope")
    nested = "rope_scaling" not in run.model_args and not longrope

    def shared(windows: Any) -> Any:
        return [window.run for window in share(windows, nested=nested)]

    works = [count_work(name, task.instances, encode, shared) for name, task in tasks.items()]
    preparing = time.perf_counter() - started
    duration = _duration(question, found, tasks, works, run.model_args, encode, shared)
    return dataclasses.replace(found, work=works, duration=duration, preparing_seconds=preparing)


def to_json_text(found: Inspection) -> str:
    """Returns what was found as JSON."""
    return json.dumps(found.to_json(), indent=2, allow_nan=False, default=str)


def _asked(checkpoint: str, question: Question) -> Asked:
    """Returns what `sbeval run` would read from the same options."""
    from lm_eval.utils import simple_parse_args_string

    given = simple_parse_args_string(question.model_args or "")
    arguments = json.dumps({"pretrained": checkpoint, "dtype": question.dtype, **given})
    options = ["--tasks", question.tasks or "", "--model_args", arguments]
    return asked(parse([*options, *(["--metadata", question.metadata] if question.metadata else [])]))


def _with_memory(described: Description, memory_bytes: int | None, lengths: tuple[int, ...]) -> Inspection:
    sizes = described.sizes
    if sizes is None:
        return Inspection(description=described, needs=None, room=None)
    device, place, here = memory_here() if memory_bytes is None else ("cuda", "a GPU", memory_bytes)
    shown = lengths_shown(described.training_length_tokens, lengths)
    longest = longest_tokens(sizes, here, device)
    if described.learned_positions is not None:
        longest = min(longest[0], described.learned_positions), min(longest[1], described.learned_positions)
    return Inspection(
        description=described,
        needs=[needs(sizes, length, device=device, batch_tokens=BATCH_TOKENS[device]) for length in shown],
        room=Room(
            place=place,
            device=device,
            memory_bytes=here,
            longest_window_tokens=longest[0],
            longest_text_tokens=longest[1],
        ),
    )


def _duration(
    question: Question,
    found: Inspection,
    tasks: Mapping[str, Any],
    works: list[TaskWork],
    model_args: Mapping[str, Any],
    encode: Encode,
    share: ShareWindows,
) -> Duration | None:
    sizes = found.description.sizes
    assert sizes is not None
    if question.measured is not None:
        return by_results(question.measured, works, sizes)
    return by_running(tasks, model_args, memory_here()[0], encode, share) if question.measure else None
