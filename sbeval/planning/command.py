"""The `sbeval plan` command: which differences a number of documents shows, how many one needs, and what they cost."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sbeval.errors import UserError
from sbeval.planning.power import POWER, Spread
from sbeval.planning.report import NATS, TAILS, Cost, Plan, Planned
from sbeval.processes.next_step import print_next_step
from sbeval.settings import Count, Lengths, PositiveNumber, as_number, read_value

_RESULTS = typer.Argument(metavar="RESULTS...", help="Earlier results files or folders, with samples, for the spreads.")
_TASKS = typer.Option(metavar="TASK,TASK,...", help="Tasks to plan.")
_DOCUMENTS = typer.Option(help="Documents or samples of each task, as --limit of `sbeval run` takes them.")
_LENGTHS = typer.Option(metavar="L,L,...", help="Context lengths in tokens; by default those of the earlier results.")
_SPREAD = typer.Option(metavar="NATS", help="Standard deviation over documents of a paired difference of NLL.")
_CHANGED = typer.Option(
    metavar="SHARE", help="Share of samples whose score of 0 or 1 differs between two lengths or models."
)
_DIFFERENCE = typer.Option(metavar="NUMBER", help="A wanted difference: says how many documents or samples it needs.")
_POWER = typer.Option(help="Probability with which a difference is to be shown.")
_MODEL_ARGS = typer.Option(
    "--model_args", "--model-args", metavar="KEY=VALUE,...", help="pretrained=CKPT counts requests and tokens exactly."
)
_METADATA = typer.Option(metavar="JSON", help="Options of the tasks, as `sbeval run` takes them.")
_MEASURE = typer.Option("--measure", help="Estimate the time by running some documents with the model on this machine.")
_SPEED = typer.Option(
    "--tokens_per_second", "--tokens-per-second", help="Speed for the time, in input tokens per second of model time."
)
Earlier = Any
"""`sbeval.reports.spreads.Earlier`, which this package does not import."""


def plan_command(
    arguments: Sequence[str],
    read_earlier: Callable[[Sequence[Path], Sequence[str], Sequence[int] | None], Earlier],
    expand: Callable[[Iterable[str]], Iterable[tuple[str, Mapping[str, Any] | None]]],
    inspect: Callable[..., Any],
) -> None:
    """Runs `sbeval plan` with the given command-line arguments.

    Args:
        arguments: arguments after `sbeval plan`.
        read_earlier: reads spreads from results files: `sbeval.reports.spreads.earlier_spreads`.
        expand: expands names of tasks and groups: `sbeval.tasks.packaged.expand_names`.
        inspect: counts tokens and estimates time: `sbeval.inspection.command.inspect` with its functions.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command("plan")
    def command(
        results: Annotated[list[Path] | None, _RESULTS] = None,
        tasks: Annotated[str | None, _TASKS] = None,
        documents: Annotated[int, _DOCUMENTS] = 40,
        lengths: Annotated[str | None, _LENGTHS] = None,
        spread: Annotated[float | None, _SPREAD] = None,
        changed: Annotated[float | None, _CHANGED] = None,
        difference: Annotated[float | None, _DIFFERENCE] = None,
        power: Annotated[float, _POWER] = POWER,
        model_args: Annotated[str | None, _MODEL_ARGS] = None,
        metadata: Annotated[str | None, _METADATA] = None,
        measure: Annotated[bool, _MEASURE] = False,
        tokens_per_second: Annotated[float | None, _SPEED] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Say which differences of NLL or score a number of documents shows, how many one needs, and what they cost.

        A difference is shown if its 95% confidence interval excludes zero. It is paired: the same documents or samples
        at two lengths, or by two models.
        """
        if not tasks:
            raise UserError("--tasks names no task: name the tasks to plan.")
        for name, value in (
            ("--spread", spread),
            ("--difference", difference),
            ("--tokens_per_second", tokens_per_second),
        ):
            if value is not None:
                read_value(PositiveNumber, value, name=name)
        for name, share in (("--changed", changed), ("--power", power)):
            _check_share(name, share)
        read_value(Count, documents, name="--documents")
        chosen: tuple[int, ...] | None = lengths and read_value(Lengths, lengths, name="--lengths")  # type: ignore[assignment]
        names = {name: definition for task in tasks.split(",") for name, definition in expand([task.strip()])}
        earlier = read_earlier(results, list(names), chosen) if results else None
        stated = {True: spread, False: None if changed is None else changed**0.5}
        common = {"units": documents, "power": power, "wanted": difference}
        planned = [
            each
            for name, definition in names.items()
            for each in _planned(name, _scores_text(definition), earlier, stated, chosen, common)
        ]
        cost, source = _costs(
            inspect, names, documents, chosen or _lengths_of(earlier, names), model_args, metadata, measure
        )
        if tokens_per_second is None and earlier is not None and source is None:
            tokens_per_second = earlier.tokens_per_second
            if tokens_per_second is not None:
                place = earlier.gpu or "a CPU"
                source = f"{tokens_per_second:,.0f} tokens per second, as the earlier run had on {place}"
        elif tokens_per_second is not None:
            source = f"{tokens_per_second:,.0f} tokens per second, as stated"
        if tokens_per_second is not None:
            cost = [_timed(each, tokens_per_second) for each in cost]
        plan = Plan(planned=planned, costs=cost, time_source=source, notes=_notes(names, planned, earlier))
        print(json.dumps(plan.to_json(), indent=2, allow_nan=False) if as_json else plan.to_text())
        if not as_json:
            print_next_step(
                f"sbeval run --model_args pretrained=CKPT --tasks {tasks} --limit {documents} --output_path results"
            )

    app(list(arguments), prog_name="sbeval plan")


def _check_share(name: str, share: float | None) -> None:
    try:
        if share is not None:
            as_number(share, lambda value: 0 < value < 1)
    except ValueError:
        raise UserError(f"Expected {name} between 0 and 1, found {share}: correct it.") from None


def _scores_text(definition: Mapping[str, Any] | None) -> bool:
    """Whether a task scores the NLL of text, judged by the class in its YAML."""
    return ".perplexity." in str((definition or {}).get("class"))


def _planned(
    task: str,
    scores_text: bool,
    earlier: Earlier,
    stated: Mapping[bool, float | None],
    lengths: Sequence[int] | None,
    common: Mapping[str, Any],
) -> list[Planned]:
    """Returns the planned differences of one task: those of earlier results, or else one with the stated spread."""
    if (spread := stated[scores_text]) is not None:
        return [
            Planned(
                task=task,
                difference="any two lengths or models",
                unit=NATS if scores_text else "score",
                spread=Spread(estimate=spread),
                source="of a paired difference, as stated",
                comparisons=max(1, len(lengths or ()) - 1),
                **common,
            )
        ]
    by_kind: dict[tuple[tuple[str, ...], bool], list[Any]] = {}
    for known in earlier.pilots if earlier is not None else ():
        if known.task == task:
            by_kind.setdefault((known.models, len(known.lengths) > 1), []).append(known)
    return [
        Planned(
            task=task,
            difference=_difference_text(known),
            unit=known.unit,
            spread=known.spread,
            source=f"{known.units:,} {'documents' if known.unit == NATS else 'samples'} of the earlier results"
            + (", which differ much in size, so intervals are doubtful" if known.doubtful else ""),
            comparisons=len(group),
            **common,
        )
        for group in by_kind.values()
        for known in group
    ]


def _difference_text(spread: Any) -> str:
    lengths = " minus ".join(f"{length:,}" for length in spread.lengths)
    models = " minus ".join(spread.models)
    return f"{lengths}, {models}" if len(spread.lengths) > 1 else f"{models}, {lengths}"


def _lengths_of(earlier: Earlier, names: Iterable[str]) -> tuple[int, ...]:
    """Returns the context lengths of the earlier spreads of these tasks, ascending."""
    spreads = earlier.pilots if earlier is not None else ()
    return tuple(sorted({length for spread in spreads if spread.task in names for length in spread.lengths}))


def _costs(
    inspect: Callable[..., Any],
    names: Mapping[str, Any],
    documents: int,
    lengths: Sequence[int],
    model_args: str | None,
    metadata: str | None,
    measure: bool,
) -> tuple[list[Cost], str | None]:
    """Returns the cost of each task, and where its time comes from; None if it is unknown.

    Raises:
        UserError: an option needs a checkpoint and none is named, or a task or the checkpoint cannot be read.
    """
    from sbeval.harness.options import read_mapping  # a slow import that --help does without

    arguments = read_mapping(model_args or "", "--model_args")
    checkpoint = arguments.pop("pretrained", None)
    if checkpoint is None:
        for name, value in (("--measure", measure), ("--model_args", model_args), ("--metadata", metadata)):
            if value:
                raise UserError(f"{name} needs a checkpoint: name it with --model_args pretrained=CKPT.")
        tokens = documents * sum(lengths)
        return [Cost(task=name, units=documents, tokens=tokens, is_counted=False) for name in names if tokens], None
    settings = read_mapping(metadata or "{}", "--metadata")
    if lengths and "context_lengths" not in settings:
        settings["context_lengths"] = list(lengths)
    options = {"model_args": json.dumps(arguments) if arguments else None, "metadata": json.dumps(settings)}
    answer = inspect(str(checkpoint), tasks=",".join(names), limit=documents, measure=measure, **options)
    seconds = answer.duration.model_seconds if answer.duration is not None else {}
    costs = [
        Cost(
            task=work.task,
            units=work.documents,
            tokens=work.tokens,
            new_tokens=work.new_tokens,
            seconds=seconds.get(work.task),
        )
        for work in answer.work or ()
    ]
    return costs, None if answer.duration is None else f"estimated from {answer.duration.source}"


def _timed(cost: Cost, tokens_per_second: float) -> Cost:
    seconds = (cost.tokens + cost.new_tokens) / tokens_per_second
    values = {"task": cost.task, "units": cost.units, "tokens": cost.tokens, "new_tokens": cost.new_tokens}
    return Cost(**values, seconds=seconds, is_counted=cost.is_counted)  # type: ignore[arg-type]


def _notes(names: Iterable[str], planned: Sequence[Planned], earlier: Earlier) -> list[str]:
    """Returns sentences on what pilots lack, and on tasks without a spread.

    Raises:
        UserError: no task has a spread.
    """
    known = {each.task for each in planned}
    missing = [name for name in names if name not in known]
    reasons = dict(sentence.split(": ", 1) for sentence in (earlier.left_out if earlier is not None else ()))
    remedy = "state one with --spread (NLL) or --changed (scores)"
    if not known:
        reason = next(iter(reasons.values()), "no earlier results are named")
        raise UserError(f"The spread of {', '.join(missing)} is unknown, because {reason}: {remedy}.")
    unplanned = [f"{name} is not planned: {reasons.get(name, 'no spread is stated')}; {remedy}." for name in missing]
    from_pilots = any(each.spread.draws_B2 is not None for each in planned)
    return [TAILS] * from_pilots + unplanned
