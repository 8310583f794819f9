"""The `sbeval plan` command: which differences a number of documents shows, how many one needs, and what they cost."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sbeval.errors import UserError
from sbeval.planning.power import POWER, Spread
from sbeval.planning.report import NATS, TAILS, Cost, Plan, Planned
from sbeval.processes.next_step import evaluation_of, print_next_step
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
_LEAST_POWER = 0.5
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
        _check_share("--changed", changed)
        _check_share("--power", power, least=_LEAST_POWER)
        if measure and tokens_per_second is not None:
            raise UserError("--measure and --tokens_per_second both set the speed: remove one of them.")
        read_value(Count, documents, name="--documents")
        chosen: tuple[int, ...] | None = lengths and read_value(Lengths, lengths, name="--lengths")  # type: ignore[assignment]
        run = _read_run(model_args, metadata, chosen, measure=measure)
        chosen = run.lengths
        names = {name: definition for task in tasks.split(",") for name, definition in expand([task.strip()])}
        earlier = read_earlier(results, list(names), chosen) if results else None
        stated = {True: spread, False: None if changed is None else changed**0.5}
        common = {"units": documents, "power": power, "wanted": difference}
        planned = [
            each
            for name, definition in names.items()
            for each in _planned(name, definition, earlier, stated, chosen, common)
        ]
        notes = _notes(names, planned, earlier, is_changed_stated=changed is not None)
        cost, source = _costs(inspect, names, documents, chosen or _lengths_of(earlier, names), run, measure)
        planned = [_with_available(each, cost) for each in planned]
        notes = [*_fewer_notes(planned, documents), *notes]
        if tokens_per_second is None and earlier is not None and source is None:
            tokens_per_second = earlier.tokens_per_second
            if tokens_per_second is not None:
                place = earlier.gpu or "a CPU"
                source = f"{tokens_per_second:,.0f} tokens per second, as the earlier run had on {place}"
        elif tokens_per_second is not None:
            source = f"{tokens_per_second:,.0f} tokens per second, as stated"
        if tokens_per_second is not None:
            cost = [_timed(each, tokens_per_second) for each in cost]
        plan = Plan(planned=planned, costs=cost, time_source=source, notes=notes)
        print(json.dumps(plan.to_json(), indent=2, allow_nan=False) if as_json else plan.to_text())
        if not as_json:
            print_next_step(run.next_step(tasks, documents))

    app(list(arguments), prog_name="sbeval plan")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """The options that a plan shares with `sbeval run`.

    Attributes:
        checkpoint: the checkpoint; None if none is named.
        arguments: further arguments of the model.
        metadata: options of the tasks, with the context lengths if these are stated.
        lengths: context lengths; None if they are not stated.
    """

    checkpoint: str | None
    arguments: Mapping[str, Any]
    metadata: Mapping[str, Any]
    lengths: tuple[int, ...] | None

    def next_step(self, tasks: str, documents: int) -> str:
        """Returns the command line that runs the plan."""
        return evaluation_of(
            self.checkpoint or "CKPT",
            tasks=tasks,
            metadata=json.dumps(self.metadata) if self.metadata else None,
            model_args=json.dumps(self.arguments) if self.arguments else None,
            limit=documents,
        )


def _read_run(model_args: str | None, metadata: str | None, lengths: tuple[int, ...] | None, *, measure: bool) -> _Run:
    """Reads the options that a plan shares with `sbeval run`.

    Raises:
        UserError: an option needs a checkpoint and none is named, or two options state different lengths.
    """
    from sbeval.harness.options import read_mapping  # a slow import that --help does without

    arguments = read_mapping(model_args or "", "--model_args")
    checkpoint = arguments.pop("pretrained", None)
    if checkpoint is None:
        for name, value in (("--measure", measure), ("--model_args", model_args), ("--metadata", metadata)):
            if value:
                raise UserError(f"{name} needs a checkpoint: name it with --model_args pretrained=CKPT.")
    settings = dict(read_mapping(metadata or "{}", "--metadata"))
    if "context_lengths" in settings:
        of_metadata = read_value(Lengths, settings["context_lengths"], name="context_lengths", source="--metadata")
        if lengths and set(lengths) != set(of_metadata):
            named = [",".join(map(str, each)) for each in (lengths, of_metadata)]
            raise UserError(
                f"--lengths says {named[0]}, and context_lengths in --metadata says {named[1]}: remove one of them."
            )
        lengths = tuple(of_metadata)
    elif lengths:
        settings["context_lengths"] = list(lengths)
    named_checkpoint = None if checkpoint is None else str(checkpoint)
    return _Run(checkpoint=named_checkpoint, arguments=arguments, metadata=settings, lengths=lengths or None)


def _check_share(name: str, share: float | None, least: float = 0.0) -> None:
    try:
        if share is not None:
            as_number(share, lambda value: 0 < value < 1 and value >= least)
    except ValueError:
        expected = f"of at least {least:g} and below 1" if least else "between 0 and 1"
        raise UserError(f"Expected {name} {expected}, found {share}: correct it.") from None


def _scores_text(definition: Mapping[str, Any] | None) -> bool:
    """Whether a task scores the NLL of text, judged by the class in its YAML."""
    return ".perplexity." in str((definition or {}).get("class"))


def _has_scores(definition: Mapping[str, Any] | None) -> bool:
    """Returns True if each sample of a task may be right (1) or wrong (0); None is a task of lm-eval, which counts."""
    return definition is None or "ruler" in (definition.get("metadata") or {})


def _generates(definition: Mapping[str, Any] | None) -> bool:
    return (definition or {}).get("output_type") == "generate_until"


def _planned(
    task: str,
    definition: Mapping[str, Any] | None,
    earlier: Earlier,
    stated: Mapping[bool, float | None],
    lengths: Sequence[int] | None,
    common: Mapping[str, Any],
) -> list[Planned]:
    """Returns the planned differences of one task: those of earlier results, or else one with the stated spread."""
    scores_text = _scores_text(definition)
    if (spread := stated[scores_text]) is not None and (scores_text or _has_scores(definition)):
        has_lengths = definition is not None
        return [
            Planned(
                task=task,
                difference="any two lengths or models" if has_lengths else "any two models",
                unit=NATS if scores_text else "score",
                spread=Spread(estimate=spread, largest=math.inf if scores_text else spread**2),
                source="of a paired difference, as stated",
                comparisons=max(1, len(lengths or ()) - 1) if has_lengths else 1,
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
    names: Mapping[str, Mapping[str, Any] | None],
    documents: int,
    lengths: Sequence[int],
    run: _Run,
    measure: bool,
) -> tuple[list[Cost], str | None]:
    """Returns the cost of each task, and where its time comes from; None if it is unknown.

    Raises:
        UserError: a task or the checkpoint cannot be read.
    """
    generates = {name: _generates(definition) for name, definition in names.items()}
    if run.checkpoint is None:
        tokens = documents * sum(lengths)
        with_lengths = [name for name, definition in names.items() if definition is not None and tokens]
        costs = [
            Cost(task=name, units=documents, tokens=tokens, is_counted=False, generates=generates[name])
            for name in with_lengths
        ]
        return costs, None
    settings = dict(run.metadata)
    if lengths and "context_lengths" not in settings:
        settings["context_lengths"] = list(lengths)
    options = {"model_args": dict(run.arguments) or None, "metadata": json.dumps(settings)}
    answer = inspect(run.checkpoint, tasks=",".join(names), limit=documents, measure=measure, **options)
    seconds = answer.duration.model_seconds if answer.duration is not None else {}
    costs = [
        Cost(
            task=work.task,
            units=work.documents,
            tokens=work.tokens,
            new_tokens=work.new_tokens,
            seconds=seconds.get(work.task),
            generates=generates.get(work.task, False) or work.new_tokens > 0,
            available=work.available_documents,
        )
        for work in answer.work or ()
    ]
    return costs, None if answer.duration is None else f"estimated from {answer.duration.source}"


def _timed(cost: Cost, tokens_per_second: float) -> Cost:
    """Returns the cost with the time of its input tokens; a speed of inputs says nothing about generation."""
    return dataclasses.replace(cost, seconds=cost.tokens / tokens_per_second, excludes_generation=cost.generates)


def _with_available(planned: Planned, costs: Sequence[Cost]) -> Planned:
    """Returns the plan with the number of documents that the task has, at most as many as planned."""
    cost = next((cost for cost in costs if cost.task == planned.task and cost.is_counted), None)
    if cost is None:
        return planned
    return dataclasses.replace(planned, units=min(planned.units, cost.units), available=cost.available)


def _fewer_notes(planned: Sequence[Planned], documents: int) -> list[str]:
    """Returns a sentence for each task that has fewer documents than --documents."""
    units = {each.task: each.units for each in planned if each.units < documents}
    return [f"{task} has {count:,}, not {documents:,}: the plan is for {count:,}." for task, count in units.items()]


def _notes(
    names: Mapping[str, Mapping[str, Any] | None],
    planned: Sequence[Planned],
    earlier: Earlier,
    *,
    is_changed_stated: bool,
) -> list[str]:
    """Returns sentences on what pilots lack, and on tasks without a spread.

    Raises:
        UserError: no task has a spread.
    """
    known = {each.task for each in planned}
    missing = [name for name in names if name not in known]
    reasons = dict(sentence.split(": ", 1) for sentence in (earlier.left_out if earlier is not None else ()))
    remedy = "state one with --spread (NLL) or --changed (scores)"
    unscored = [name for name in missing if not (_scores_text(names[name]) or _has_scores(names[name]))]
    no_score = "its samples have neither an NLL of text nor scores of 0 or 1"
    if not known:
        if unscored == missing:
            raise UserError(f"{', '.join(missing)} cannot be planned, because {no_score}: name other tasks.")
        reason = next(iter(reasons.values()), "no earlier results are named")
        raise UserError(f"The spread of {', '.join(missing)} is unknown, because {reason}: {remedy}.")
    unplanned = [
        f"{name} is not planned: {no_score}."
        if name in unscored
        else f"{name} is not planned: {reasons.get(name, 'no spread is stated')}; {remedy}."
        for name in missing
    ]
    if is_changed_stated:
        unplanned += [
            f"{name} is a task of lm-eval, without context lengths: the plan holds if its samples score 0 or 1."
            for name, definition in names.items()
            if definition is None and name in known
        ]
    from_pilots = any(each.spread.draws_B2 is not None for each in planned)
    return [TAILS] * from_pilots + unplanned
