"""The `sbeval inspect` command: prints facts about a checkpoint as text or as JSON."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sbeval.caches.choice import EXPECTED, CacheChoice, parse_cache
from sbeval.errors import UserError, time_text
from sbeval.hub_names import check_name
from sbeval.processes.next_step import evaluation_of, print_next_step
from sbeval.rope_parameters import LENGTH_DEPENDENT, kind_of, rope_entries
from sbeval.settings import Expected, Lengths, Limit, Patterns, as_counts, read_value

if TYPE_CHECKING:
    from sbeval.inspection.description import Description
    from sbeval.inspection.memory import CacheSize, Needs, Room
    from sbeval.inspection.work import Duration, TaskWork

_CHECKPOINT = typer.Argument(
    metavar="CHECKPOINT", help="Folder or hub id of a checkpoint; it is downloaded completely, as for a run."
)
_MEMORY = typer.Option(
    metavar="SIZE", help="Memory of a GPU, such as 80GiB; by default the free memory of this machine."
)
_LENGTHS = typer.Option(metavar="L,L,...", help="Context lengths in tokens to show memory for.")
_DTYPE = typer.Option(help="Dtype of the loaded weights; auto keeps the checkpoint's.")
_KV_EXPAND = typer.Option(help="How grouped query heads of dolomite-engine checkpoints share keys and values.")
_TASKS = typer.Option(metavar="TASK,TASK,...", help="Count the requests and tokens of these tasks.")
_METADATA = typer.Option(help="Options of the tasks, as `sbeval run` takes them.")
_MODEL_ARGS = typer.Option(
    "--model_args", "--model-args", metavar="KEY=VALUE,...", help="Arguments of the model, as `sbeval run` takes them."
)
_LIMIT = typer.Option(help="Documents of each task, or a share of them.")
_SELF_TEST = typer.Option(
    "--self-test", help="Load the model and test which batching and caching modes give correct logits."
)
_MEASURE = typer.Option("--measure", help="Estimate time by loading the model and running some documents of each task.")


def inspect_command(
    arguments: Sequence[str], check: Callable[..., bool], share: Callable[..., Any], test: Callable[..., Any]
) -> None:
    """Runs `sbeval inspect` with the given command-line arguments.

    Args:
        arguments: arguments after `sbeval inspect`.
        check: the function with which `sbeval run` checks tasks, see `inspect`.
        share: the model adapter's `share_windows`, see `inspect`.
        test: the model adapter's self-test: takes arguments of the model, loads it, and returns the result.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command("inspect")
    def command(
        checkpoint: Annotated[str, _CHECKPOINT],
        memory: Annotated[str | None, _MEMORY] = None,
        lengths: Annotated[str | None, _LENGTHS] = None,
        dtype: Annotated[str, _DTYPE] = "auto",
        kv_expand: Annotated[Literal["auto", "interleave", "tile"], _KV_EXPAND] = "auto",
        tasks: Annotated[str | None, _TASKS] = None,
        metadata: Annotated[str | None, _METADATA] = None,
        model_args: Annotated[str | None, _MODEL_ARGS] = None,
        limit: Annotated[float | None, _LIMIT] = None,
        measure: Annotated[bool, _MEASURE] = False,
        self_test: Annotated[bool, _SELF_TEST] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Describe a checkpoint, its memory needs and the duration of tasks, without loading its weights.

        The exit code is 1 if the checkpoint cannot be loaded.
        """
        started = time.perf_counter()  # start the clock before the imports, whose time is part of a run
        check_name(checkpoint, "a checkpoint", file="config.json")
        arguments = _parsed(model_args)
        options: dict[str, Any] = {"memory": memory, "lengths": lengths, "dtype": dtype, "kv_expand": kv_expand}
        options |= {"tasks": tasks, "metadata": metadata, "model_args": arguments, "limit": limit, "measure": measure}
        answer = inspect(checkpoint, check=check, share=share, started=started, **options)
        if self_test and answer.description.format is not None:
            model = {"pretrained": checkpoint, "dtype": dtype, "kv_expand": kv_expand}
            answer = dataclasses.replace(answer, self_test=test(**{**model, **arguments}))
        print(json.dumps(answer.to_json(), indent=2, allow_nan=False, default=str) if as_json else answer.to_text())
        if answer.description.format is None:
            raise typer.Exit(1)
        if not as_json:
            step = evaluation_of(checkpoint, tasks=tasks, metadata=metadata, model_args=model_args, limit=limit)
            print_next_step(f"mend what is missing or wrong, then {step}" if answer.description.problems else step)

    app(list(arguments), prog_name="sbeval inspect")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The result of `sbeval inspect`; fields that were not requested are None.

    Attributes:
        description: facts about the checkpoint.
        needs: memory at each length.
        cache_size: bytes of a token in the KV cache.
        room: available memory, and the longest window and text that fit into it.
        work: requests and tokens of each task.
        duration: estimated time of the tasks.
        preparing_seconds: time that the imports and the building of the tasks' requests took here; a run takes as long.
        self_test: result of the self-test.
    """

    description: "Description"
    needs: "Sequence[Needs] | None" = None
    cache_size: "CacheSize | None" = None
    room: "Room | None" = None
    work: "Sequence[TaskWork] | None" = None
    duration: "Duration | None" = None
    preparing_seconds: float | None = None
    self_test: Any = None

    def to_json(self) -> dict[str, Any]:
        """Returns the result for JSON; unknown values are null."""
        described = dataclasses.asdict(self.description)
        described["unread"] = self.description.unread.to_json()
        del described["cache_unsuited"]  # it is beside the bytes of the cache
        seconds: Mapping[str, float] = {} if self.duration is None else self.duration.model_seconds
        estimate = None
        if self.duration is not None:
            estimate = {**dataclasses.asdict(self.duration), "seconds": self.duration.seconds}
            estimate["preparing_seconds"] = self.preparing_seconds
        return {
            "checkpoint": {**described, **{name: list(described[name]) for name in ("evidence", "problems")}},
            "memory": {
                "room": dataclasses.asdict(self.room) if self.room else None,
                "cache": dataclasses.asdict(self.cache_size) if self.cache_size else None,
                "needs": self.needs and [dataclasses.asdict(row) for row in self.needs],
            },
            "tasks": self.work and [{**work.to_json(), "seconds": seconds.get(work.task)} for work in self.work],
            "estimate": estimate,
            "self_test": self.self_test and self.self_test.to_json(),
        }

    def to_text(self) -> str:
        """Returns the result as text."""
        lines = _description_lines(self.description)
        if self.needs is not None and self.room is not None:
            lines += ["", *_memory_lines(self.needs, self.room)]
        if self.cache_size is not None:
            lines.append(_cache_line(self.cache_size))
        if self.work is not None:
            lines += ["", *_work_lines(self.work, self.duration, self.preparing_seconds)]
        if self.self_test is not None:
            lines += ["", *self.self_test.table()]
        return "\n".join(lines)


def inspect(
    checkpoint: str,
    *,
    check: Callable[..., bool],
    share: Callable[..., Any],
    memory: str | None = None,
    lengths: str | None = None,
    dtype: str = "auto",
    kv_expand: Literal["auto", "interleave", "tile"] = "auto",
    tasks: str | None = None,
    metadata: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    limit: float | None = None,
    measure: bool = False,
    started: float | None = None,
) -> Inspection:
    """Describes a checkpoint and its memory needs; with `tasks`, counts requests and, with `measure`, estimates time.

    Args:
        checkpoint: folder or hub id.
        check: raises a `UserError` for tasks that cannot run, and returns whether lm-eval's own tasks are needed.
        share: the model adapter's `share_windows`: a function from windows to those windows that the model really runs.
        memory: memory of a GPU such as "80GiB"; None takes the free memory of this machine.
        lengths: context lengths to show memory for, "L,L,...".
        dtype: dtype of the loaded weights.
        kv_expand: which key/value head a query head of a dolomite-engine checkpoint uses (`read_dolomite`).
        tasks: names of tasks to count, "TASK,TASK,...".
        metadata: options of the tasks, as `sbeval run --metadata` takes them.
        model_args: arguments of the model by name, as `sbeval run --model_args` takes them.
        limit: number of documents of each task, or a fraction of them.
        measure: whether to estimate time by running some documents of each task.
        started: `time.perf_counter()` when the command started; None takes now.

    Raises:
        UserError: the checkpoint cannot be read, or an option is wrong.
    """
    # these import torch, which --help does without
    from sbeval.inspection.description import describe
    from sbeval.inspection.memory import cache_size, device_here, needs, read_memory, room_of  # imports torch
    from sbeval.inspection.work import count_work, encode_with, make_tasks  # imports torch
    from sbeval.inspection.work import measure as measured  # imports torch

    started = time.perf_counter() if started is None else started
    memory_bytes = None if memory is None else read_memory(memory)
    lengths_shown: Sequence[int] = () if lengths is None else read_value(Lengths, lengths, name="--lengths")
    if limit is not None:
        read_value(Limit, limit, name="--limit")
    if tasks is None and measure:
        raise UserError("--measure needs --tasks: name the tasks to estimate.")
    given = dict(model_args or {})
    extrapolation, cache = _extrapolation(given), _cache(given)
    source = given.get("tokenizer")
    description = describe(
        checkpoint,
        dtype=dtype,
        kv_expand=kv_expand,
        allow_unread=_allow_unread(given),
        tokenizer_source=None if source is None else str(source),
        cache=cache,
    )
    run = None
    if tasks is not None:
        run = _run_options({"pretrained": checkpoint, "dtype": dtype, **given}, tasks, metadata)
        if not lengths_shown and "context_lengths" in run.metadata:
            lengths_shown = as_counts(run.metadata["context_lengths"])
    if description.sizes is None:
        return Inspection(description=description)
    is_longrope = isinstance(extrapolation, Mapping)
    zones = extrapolation is not None and not is_longrope and len(extrapolation.zones) > 1
    description = dataclasses.replace(description, sizes=dataclasses.replace(description.sizes, zones=zones))
    assert description.sizes is not None
    room = room_of(description.sizes, memory_bytes, description.learned_positions)
    first = description.training_length_tokens or 1024
    lengths_shown = sorted(lengths_shown) or [first * times for times in (1, 4, 16, 64)]
    needs_by_length = [needs(description.sizes, length, device=room.device) for length in lengths_shown]
    in_cache = cache_size(description.sizes, cache, description.cache_unsuited)
    answer = Inspection(description=description, needs=needs_by_length, cache_size=in_cache, room=room)
    if run is None:
        return answer
    made = make_tasks(run.tasks, run.metadata, folders=run.folders, limit=limit, packaged=not check(run))
    encode = encode_with(str(run.model_args.get("tokenizer") or description.folder))
    by_length = any(kind_of(entry) in LENGTH_DEPENDENT for entry in rope_entries(description.rope).values())
    nested = "rope_scaling" not in run.model_args and not is_longrope and not by_length

    def read(windows: Any) -> Any:
        return [window.run for window in share(windows, nested=nested)]

    work = [
        dataclasses.replace(
            count_work(name, task.instances, encode, read), available_documents=len(list(task.eval_docs))
        )
        for name, task in made.items()
    ]
    preparing = time.perf_counter() - started
    duration = measured(made, run.model_args, device_here(), encode, read) if measure else None
    return dataclasses.replace(answer, work=work, duration=duration, preparing_seconds=preparing)


def _run_options(model_args: Mapping[str, Any], tasks: str, metadata: str | None) -> Any:
    """Parses the options as `sbeval run` does."""
    # imports lm-eval, which --help does without
    from sbeval.harness.options import parse, run_options

    options = ["--tasks", tasks, "--model_args", json.dumps(model_args)]
    if metadata:
        options += ["--metadata", metadata]
    return run_options(vars(parse(options)))


def _parsed(model_args: str | None) -> dict[str, Any]:
    from sbeval.harness.options import read_mapping  # slow import that --help does without

    return read_mapping(model_args or "", "--model_args")


def _extrapolation(model_args: Mapping[str, Any]) -> Any:
    """Returns the extrapolation method of the model's arguments as `parse_extrapolation` does, None without."""
    from sbeval.models.extrapolation.methods import parse_extrapolation  # imports torch, which --help does without

    spec = model_args.get("extrapolation")
    return None if spec is None else parse_extrapolation(str(spec))


def _cache(model_args: Mapping[str, Any]) -> CacheChoice | None:
    """Returns the KV cache of the model's arguments, None without."""
    kind = Annotated[CacheChoice, Expected(EXPECTED, parse_cache)] | None
    choice: CacheChoice | None = read_value(kind, model_args.get("cache"), name="cache", source="--model_args")
    return choice


def _allow_unread(model_args: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the patterns of tensors that `allow_unread` in the model's arguments permits to stay unread."""
    patterns = model_args.get("allow_unread")
    return read_value(Patterns | None, patterns, name="allow_unread", source="--model_args") or ()


def _description_lines(described: "Description") -> list[str]:
    sizes, tokenizer = described.sizes, described.tokenizer
    rows = {
        "format": f"{described.format or 'cannot be loaded'}; recognised by {', '.join(described.evidence)}",
        "attention": described.attention,
        "": _pairs(described.details),
        "sizes": sizes and str(sizes),
        "weights": sizes and f"{sizes.parameters:,} parameters, {bytes_text(sizes.weight_bytes)} in {described.dtype}",
        "training length": described.format and "unknown: give training_length=... in --model_args",
        "learned positions": described.learned_positions
        and f"{described.learned_positions:,}, the longest possible input",
        "RoPE": _pairs(described.rope),
        "extended from": _pairs(described.extended_from),
        "tokenizer": tokenizer and str(tokenizer),
        "left unread": described.unread.sentence(),
    }
    if described.training_length_tokens:
        tokens = described.training_length_tokens
        rows["training length"] = f"{tokens:,} tokens, from {described.training_length_from}"
    state = "all present" if not described.unread else "all that are read are present"
    wrong = described.problems or [f"nothing: {described.tensors} tensors, {state}"]
    lines = [f"  {name:<18}{text}" for name, text in rows.items() if text]
    return [described.folder, *lines, *(f"  {'missing or wrong':<18}{sentence}" for sentence in wrong)]


def _memory_lines(needs: "Sequence[Needs]", room: "Room") -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("tokens", "one window", "fixed_target", "full batch", "generation", "full prefill", "each extra text")
    ]
    for row in needs:
        sizes = (row.all_targets, row.last_targets, row.batch, row.generation, row.prefill, row.further_text)
        rows.append((f"{row.length_tokens:,}", *map(bytes_text, sizes)))
    memory = f"{bytes_text(room.memory_bytes)} of {room.place}, with a tenth left free,"
    fits = (
        f"{memory} hold the weights and one window of {room.longest_window_tokens:,} tokens, or one generated text of "
        f"{room.longest_text_tokens:,} tokens with its prompt."
    )
    return [
        "Memory beside the weights: one window (rolling, stream, sliding, position), one of fixed_target, generation",
        "of one text; several texts take a full prefill of their prompts, and each its KV cache",
        *("  " + "".join(f"{cell:>16}" for cell in row) for row in rows),
        fits if room.longest_window_tokens else f"{memory} do not hold the weights.",
    ]


def _cache_line(size: "CacheSize") -> str:
    line = f"KV cache: {size.full:,.0f} bytes a token"
    if size.cache is None:
        return f"{line}."
    if size.unsuited is not None:
        return f"{line}; {size.unsuited}."
    if size.replaced is None:
        return f"{line}; a run records those of cache={size.cache}."
    return f"{line}, {size.replaced:,.0f} with cache={size.cache}; the figures above are for the full cache."


def _work_lines(works: "Sequence[TaskWork]", duration: "Duration | None", preparing_seconds: float | None) -> list[str]:
    rows: list[tuple[str, ...]] = [("task", "documents", "requests", "tokens", "new, at most", "in the model")]
    for work in works:
        counts = (work.documents, work.requests, work.tokens, work.new_tokens)
        seconds = "" if duration is None else time_text(duration.model_seconds[work.task])
        rows.append((work.task, *(f"{count:,}" for count in counts), seconds))
    width = max(len(row[0]) for row in rows) + 2
    lines = [f"{name:<{width}}" + "".join(f"{cell:>16}" for cell in cells) for name, *cells in rows]
    if duration is None:
        return [*lines, "--measure runs some documents of each task to estimate the time."]
    return [
        *lines,
        f"{time_text(duration.seconds)} in the model, estimated from {duration.source}.",
        f"Before that: {time_text(preparing_seconds or 0)} for imports and building requests, "
        f"{time_text(duration.loading_seconds)} for loading the model.",
    ]


def _pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in (values or {}).items())


def _value(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value}"
    return " ".join(f"{name}: {_value(inner)}" for name, inner in value.items())


def bytes_text(count: float) -> str:
    """Returns a number of bytes with a unit, such as 512 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
