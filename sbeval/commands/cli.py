"""The `sbeval` command: the rooms of the package put together, each imported when its sub-command runs."""

import functools
import importlib
import importlib.metadata
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sbeval import report_options
from sbeval.errors import UserError
from sbeval.processes.next_step import EVALUATE, evaluation_of_folder, say_next
from sbeval.processes.signals import AskedToEnd

app = typer.Typer(name="sbeval", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
# for commands whose options are somebody else's
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False}

_Arguments = Annotated[list[str] | None, typer.Argument(metavar="OPTIONS")]
_SWEPT = typer.Argument(metavar="SWEEP.yaml | CKPT...", help="A sweep file; with --suite, checkpoints.")
_SUITES = "paper-nlp, paper-mmlu, paper-gsm8k, paper-appendix, paper-length, paper-ruler or long-context."
_SUITE = typer.Option(help=_SUITES)
_LENGTHS = typer.Option(metavar="L,L,...", help="With --suite: lengths in place of the suite's own.")
_MODEL_ARGS = typer.Option(metavar="KEY=VALUE,...", help="With --suite: arguments of every model, as lm_eval's.")
_METADATA = typer.Option(metavar="JSON", help="With --suite: metadata for the tasks, as lm_eval's.")
_RUN = typer.Option("--run", metavar="NAME", help="Run this one alone: CHECKPOINT/RUN, or a RUN of all.")
_RAY = typer.Option(metavar="ADDRESS|local", help="Several at a time, on Ray (the extra sbeval[ray]).")
_FOLLOW = typer.Option(metavar="DIR", help="Evaluate a training's checkpoints (DIR/checkpoint-*) as they appear.")
_KV_EXPAND = typer.Option(help="How grouped heads of dolomite-engine share keys and values.")
_DTYPE = typer.Option(help="Type of the weights written, such as bfloat16; auto keeps the source's.")
_TEXT = typer.Option(help="File or folder to read in place of Python's standard library.")
_Replace = Annotated[
    bool, typer.Option("--replace", help="Move what lies in the way to NAME.old-TIME beside it; nothing is deleted.")
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"sbeval {importlib.metadata.version('sbeval')}")
        raise typer.Exit


@app.callback(help="What happens to a language model when its context grows past its training length?")
def _options(version: Annotated[bool, typer.Option("--version", callback=_print_version)] = False) -> None: ...


@app.command(context_settings=_PASSED_ON, options_metavar="")
def run(arguments: _Arguments = None) -> None:
    """Evaluate: the options of `lm_eval run`, with the model `sb` and the packaged tasks already set."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        of_sb = _load("sbeval.model_adapters.options", "AdapterOptions")
        print(_load("sbeval.harness.run", "help_text")(of_sb, _load("sbeval.tasks.user_options", "metadata_keys")()))
        return
    _load("sbeval.harness.run", "run")(arguments, check_run, find_finished)


@app.command()
def sweep(
    arguments: Annotated[list[str] | None, _SWEPT] = None,
    suite: Annotated[str | None, _SUITE] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="With --suite: folder of all results.")] = None,
    context_lengths: Annotated[str | None, _LENGTHS] = None,
    limit: Annotated[float | None, typer.Option(help="With --suite: documents of a task.")] = None,
    model_args: Annotated[str | None, _MODEL_ARGS] = None,
    metadata: Annotated[str | None, _METADATA] = None,
    only: Annotated[str | None, _RUN] = None,
    ray: Annotated[str | None, _RAY] = None,
    follow: Annotated[str | None, _FOLLOW] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all runs, and only say what would be run.")] = False,
    replace: _Replace = False,
) -> None:
    """Run a suite over several checkpoints, one results file a run; what is complete is skipped.

    A run that fails does not end the others: it is named at the end, with exit code 1.
    """
    options: dict[str, Any] = {"output": output, "context_lengths": context_lengths, "limit": limit}
    options |= {"model_args": model_args, "metadata": metadata, "follow": follow}
    settings = _load("sbeval.sweep.command", "sweep_from_command")(arguments or [], suite=suite, **options)

    def check(config: Any) -> None:
        check_run(_load("sbeval.harness.options", "asked")(config))

    go = functools.partial(
        _load("sbeval.sweep.execute", "run_sweep"), only=only, dry_run=dry_run, check=check, replace=replace, ray=ray
    )
    following = settings.follow is not None
    if following and only is not None:
        raise UserError.expected("--run or a training to follow", found="both", remedy="leave one out")
    if _load("sbeval.sweep.follow", "follow")(settings, go, once=dry_run) if following else go(settings):
        raise typer.Exit(1)


@app.command(context_settings=_PASSED_ON, options_metavar="")
def launch(arguments: _Arguments = None) -> None:
    """Start run, train or extend in several processes: options of `accelerate launch`, then the command."""
    _load("sbeval.processes.launch", "launch")(arguments or ["--help"])


@app.command()
def report(
    paths: Annotated[list[Path] | None, report_options.PATHS] = None,
    output: Annotated[Path, report_options.OUTPUT] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    label: Annotated[list[str] | None, report_options.LABEL] = None,
    baseline: Annotated[str | None, report_options.BASELINE] = None,
    only: Annotated[list[str] | None, report_options.ONLY] = None,
    axis: Annotated[Literal["tokens", "training", "declared"], report_options.AXIS] = "tokens",
    within: Annotated[float, report_options.WITHIN] = 0.01,
    paper: Annotated[Path | None, report_options.PAPER] = None,
    figure: Annotated[list[str] | None, report_options.FIGURE] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Build again whenever a results file appears.")] = False,
    compare: Annotated[tuple[str, str] | None, report_options.COMPARE] = None,
    fail_if_worse: Annotated[bool, report_options.FAIL_IF_WORSE] = False,
    least_effect: Annotated[float | None, report_options.LEAST_EFFECT] = None,
    gate: Annotated[Path | None, report_options.GATE] = None,
    hub_results: Annotated[Path | None, report_options.HUB_RESULTS] = None,
    hub_dataset: Annotated[list[str] | None, report_options.HUB_DATASET] = None,
    wandb: Annotated[str | None, report_options.WANDB] = None,
    trackio: Annotated[str | None, report_options.TRACKIO] = None,
    replace: _Replace = False,
) -> None:
    """Turn results files into one self-contained page, figures and tables, or compare two models."""
    labels = _pairs(label or [], "--label OLD=NEW")
    where = {"hub_results": hub_results, "wandb": wandb, "trackio": trackio}
    if any(where.values()) and (watch or compare):
        raise UserError("Expected a page built once with what is published, found --watch or --compare: leave it out.")
    if compare is not None:
        unused = {"--watch": watch, "--only": only, "--baseline": baseline, "--title": title, "--paper": paper}
        if given := [name for name, value in unused.items() if value]:
            raise UserError(f"Expected a page or a comparison, found --compare with {', '.join(given)}: leave one out.")
        chosen = {"fail_if_worse": fail_if_worse, "least_effect": least_effect, "policy": gate}
        if code := _load("sbeval.reports.gate", "judge_command")(compare, paths or [], labels, **chosen):
            raise typer.Exit(code)
        return
    if fail_if_worse or least_effect is not None or gate is not None:
        option = "--least-effect"
        if fail_if_worse:
            option = "--fail-if-worse"
        elif gate is not None:
            option = "--gate"
        raise UserError.expected(f"--compare A B with {option}", found="it alone", remedy="name the two to compare")
    if not paths:
        raise UserError.expected("results files or folders that hold some", found="none", remedy="name at least one")

    def build() -> Path:
        shown: dict[str, Any] = {"baseline": baseline, "only": only or [], "axis": axis, "within_nats": within}
        shown |= {"paper": paper, "figures": figure or []}
        page = _build_report(paths, output, title, labels=labels, replace=replace, **shown)
        if any(where.values()):
            datasets = _pairs(hub_dataset or [], "--hub-dataset TASK=OWNER/NAME")
            chosen = {"labels": labels, "only": only or [], "datasets": datasets, "replace": replace}
            _load("sbeval.reports.publish", "publish")(paths, **where, **chosen)
        if watch:  # the last line of all others names it
            print(f"The page is {page.resolve()}", flush=True)
        return page

    if watch:
        _keep_building(paths, build)
    else:
        say_next(f"open {build().resolve().as_uri()} in a browser")


def _keep_building(paths: list[Path], build: Callable[[], Path]) -> None:
    print("Watching for results files; Ctrl-C ends it.", flush=True)

    def build_or_say_why_not() -> Path | None:
        try:
            return build()
        except UserError as error:  # a results file may be half written
            print(error, file=sys.stderr, flush=True)
            return None

    try:
        for _ in _load("sbeval.reports", "watch")(paths, build_or_say_why_not):
            pass
    except AskedToEnd as ended:
        if ended.signal is not signal.SIGINT:
            raise
        print("Watching ended.")


@app.command(context_settings=_PASSED_ON, options_metavar="")
def inspect(arguments: _Arguments = None) -> None:
    """Say what a checkpoint is, what memory it needs and how long tasks take, without loading its weights."""

    def share(*windows: Any, **options: Any) -> Any:
        return _load("sbeval.model_adapters.score.nested", "share_windows")(*windows, **options)

    def test(**model: Any) -> Any:
        model = {"device": _load("sbeval.inspection.memory", "device_here")(), **model}
        session = _load("sbeval.model_adapters.lm", "StickBreakingLM")(**model).session
        return session and session.self_test

    _load("sbeval.inspection.command", "inspect_command")(arguments or ["--help"], check_run, share, test)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder or hub id of a checkpoint of any stick-breaking format.")],
    destination: Annotated[Path, typer.Argument(help="New or empty folder to write to.")],
    kv_expand: Annotated[Literal["auto", "interleave", "tile"], _KV_EXPAND] = "auto",
    dtype: Annotated[str, _DTYPE] = "auto",
    replace: _Replace = False,
) -> None:
    """Write a released checkpoint out in this project's form, its tokenizer beside it."""
    _load("sbeval.hub_names", "check_name")(source, "a checkpoint", file="config.json")
    destination = _load("sbeval.hub_names", "local_path")(destination)
    _load("sbeval.model_adapters.open.arguments", "check_dtypes")({"dtype": dtype})
    options = {"dtype": dtype, "kv_expand": kv_expand, "replace": replace}
    loaded = _load("sbeval.checkpoints", "convert_checkpoint")(source, destination, **options)
    print(f"{source}, of the format {loaded.format}, is now in {destination.resolve()}")
    say_next(evaluation_of_folder(destination))


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page.")] = Path("report"),
    results: Annotated[Path, typer.Option(help="Folder for lm-eval's results files.")] = Path("results/demo"),
    text: Annotated[Path | None, _TEXT] = None,
    replace: _Replace = False,
) -> None:
    """Evaluate the two shipped checkpoints past their training length and build the page.

    A second page, in the folder `extension` beside it, shows stored results from before and after context extension.
    """
    if text is not None:
        _load("sbeval.tasks.user_options", "check_options")((), {"data_path": str(text)})
    for page_folder in () if replace else (output, output / "extension"):
        _load("sbeval.reports", "check_output_folder")(page_folder)
    folder = _load("sbeval.demo.evaluation", "evaluate")(results, text=text)
    title, labels = (_load("sbeval.demo.extension", name) for name in ("TITLE", "LABELS"))
    with tempfile.TemporaryDirectory() as stored:
        _load("sbeval.demo.extension", "unpack")(Path(stored))
        stored_page = _build_report([Path(stored)], output / "extension", title, labels=labels, replace=replace)
        print(f"The page of stored results is {stored_page.resolve()}", flush=True)
    page = _build_report([folder], output, "Stick-breaking and RoPE past their training length", replace=replace)
    yours = EVALUATE.format("FOLDER").replace("sbeval", _load("sbeval.demo.evaluation", "program")(), 1)
    say_next(f"open {page.resolve().as_uri()} in a browser; your own model: {yours}")


@app.command(context_settings=_PASSED_ON, options_metavar="")
def train(arguments: _Arguments = None) -> None:
    """Train a small model from a recipe or on a text of yours, or go on with it."""
    results = _load("sbeval.training.command", "train_command")(arguments or ["--help"])
    if results is not None:
        page = _build_report([results], results.parent / "report", None)
        say_next(f"open {page.resolve().as_uri()} in a browser")


@app.command(context_settings=_PASSED_ON, options_metavar="")
def extend(arguments: _Arguments = None) -> None:
    """Continue training a checkpoint at a longer context."""
    _load("sbeval.training.command", "extend_command")(arguments or ["--help"])


@app.command()
def tasks() -> None:
    """Print the folder of the packaged tasks, for lm-eval's --include_path."""
    print(_load("sbeval.registered", "tasks_folder")())


@app.command()
def install_plugin() -> None:
    """Make `lm_eval --model sb` work after an editable install (a plain install does so by itself)."""
    print(_load("sbeval.commands.install_plugin", "install")())


def check_run(asked: Any) -> bool:
    """Refuses a run that cannot start, before torch is imported; returns whether lm-eval's own tasks are needed."""
    _load("sbeval.tasks.packaged", "check_names")(asked.tasks, asked.folders)
    if not asked.tasks:
        raise UserError.expected("--tasks with names of tasks", found="none", remedy="`lm_eval ls tasks` lists them")
    _load("sbeval.tasks.packaged", "check_model")(asked.model, asked.tasks)
    if asked.model == "sb":
        _load("sbeval.model_adapters.open.arguments", "check_early")(asked.model_args, batch_size=asked.batch_size)
    _load("sbeval.tasks.user_options", "check_options")(asked.tasks, asked.metadata)
    _load("sbeval.tasks.user_options", "check_keys")(asked.tasks, asked.metadata.keys() - asked.model_args.keys())
    return not _load("sbeval.tasks.packaged", "are_all_here")(asked.tasks, asked.folders)


def find_finished(asked: Any) -> Any:
    """Returns which finished results in the output folder a run continues, with sentences about them."""
    return _load("sbeval.tasks.perplexity.continuing", "find_finished")(
        asked.tasks,
        model=asked.model,
        model_args=asked.model_args,
        metadata=asked.metadata,
        limit=asked.limit,
        output_path=asked.output_path,
    )


def _pairs(given: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for pair in given:
        left, equals, right = pair.partition("=")
        if not (left and equals and right):
            raise UserError.expected(option, found=f"{pair!r}", remedy="write both names with = between them")
        pairs[left] = right
    return pairs


def _build_report(paths: list[Path], output: Path, title: str | None, **options: Any) -> Path:
    return Path(_load("sbeval.reports", "build_report")(paths, output, title=title, **options))


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
