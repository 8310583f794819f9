"""The command `sbeval`: its sub-commands and options. A sub-command imports its package when it runs."""

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
from sbeval.processes.next_step import EVALUATE, evaluation_of_folder, print_next_step
from sbeval.processes.signals import EndedBySignal

app = typer.Typer(name="sbeval", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
_HF = ("hf", "hf-auto", "huggingface")  # lm-eval's names of its model of transformers
# for sub-commands that pass their options on to another parser
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False}

_Arguments = Annotated[list[str] | None, typer.Argument(metavar="OPTIONS")]
_SWEPT = typer.Argument(metavar="SWEEP.yaml | CKPT...", help="A sweep file; with --suite, checkpoints.")
_SUITES = "paper-nlp, paper-mmlu, paper-gsm8k, paper-appendix, paper-length, paper-ruler or long-context."
_SUITE = typer.Option(help=_SUITES)
_LENGTHS = typer.Option(metavar="L,L,...", help="With --suite: context lengths that replace the suite's own.")
_MODEL_ARGS = typer.Option(metavar="KEY=VALUE,...", help="With --suite: --model_args of lm_eval, for every checkpoint.")
_METADATA = typer.Option(metavar="JSON", help="With --suite: --metadata of lm_eval, for the tasks.")
_RUN = typer.Option("--run", metavar="NAME", help="Run only CHECKPOINT/RUN, or only RUN for all checkpoints.")
_RAY = typer.Option(metavar="ADDRESS|local", help="Run several runs at a time on Ray (the extra sbeval[ray]).")
_FOLLOW = typer.Option(metavar="DIR", help="Evaluate a training's checkpoints (DIR/checkpoint-*) as they appear.")
_KV_EXPAND = typer.Option(help="How query heads map to shared key/value heads in dolomite-engine's checkpoints.")
_DTYPE = typer.Option(help="Dtype of the written weights, such as bfloat16; auto keeps the source's.")
_TEXT = typer.Option(help="File or folder to read in place of Python's standard library.")
_Replace = Annotated[
    bool,
    typer.Option("--replace", help="Move existing files that are in the way to NAME.old-TIME; nothing is deleted."),
]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"sbeval {importlib.metadata.version('sbeval')}")
        raise typer.Exit


@app.callback(help="What happens to a language model when its context grows past its training length?")
def _options(version: Annotated[bool, typer.Option("--version", callback=_print_version)] = False) -> None: ...


@app.command(context_settings=_PASSED_ON, options_metavar="")
def run(arguments: _Arguments = None) -> None:
    """Evaluate a model: `lm_eval run` with the model `sb` and the packaged tasks."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        adapter_options = _load("sbeval.model_adapters.options", "AdapterOptions")
        print(
            _load("sbeval.harness.run", "help_text")(
                adapter_options, _load("sbeval.tasks.user_options", "metadata_keys")()
            )
        )
        return

    def check(run: Any) -> bool:
        lm_eval_tasks_needed = check_run(run)
        if run.model == "sb":
            # last, because it imports torch, and before tasks and the model are loaded
            _load("sbeval.model_adapters.open.arguments", "check_device")(run.device)
        return lm_eval_tasks_needed

    _load("sbeval.harness.run", "run")(arguments, check, find_finished)


@app.command()
def sweep(
    arguments: Annotated[list[str] | None, _SWEPT] = None,
    suite: Annotated[str | None, _SUITE] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="With --suite: folder for all results.")] = None,
    context_lengths: Annotated[str | None, _LENGTHS] = None,
    limit: Annotated[float | None, typer.Option(help="With --suite: largest number of documents of a task.")] = None,
    model_args: Annotated[str | None, _MODEL_ARGS] = None,
    metadata: Annotated[str | None, _METADATA] = None,
    only: Annotated[str | None, _RUN] = None,
    ray: Annotated[str | None, _RAY] = None,
    follow: Annotated[str | None, _FOLLOW] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all runs and print which would start.")] = False,
    replace: _Replace = False,
) -> None:
    """Run a suite over several checkpoints, with one results file for each run; complete runs are skipped.

    If a run fails, the others go on; the failed runs are printed at the end, and the exit code is 1.
    """
    options: dict[str, Any] = {"output": output, "context_lengths": context_lengths, "limit": limit}
    options |= {"model_args": model_args, "metadata": metadata, "follow": follow}
    settings = _load("sbeval.sweep.command", "sweep_from_command")(arguments or [], suite=suite, **options)

    def check(config: Any) -> None:
        check_run(_load("sbeval.harness.options", "run_options")(config))

    go = functools.partial(
        _load("sbeval.sweep.execute", "run_sweep"), only=only, dry_run=dry_run, check=check, replace=replace, ray=ray
    )
    following = settings.follow is not None
    if following and only is not None:
        raise UserError("--run cannot be combined with a training to follow: remove one of them.")
    if _load("sbeval.sweep.follow", "follow")(settings, go, once=dry_run) if following else go(settings):
        raise typer.Exit(1)


@app.command(context_settings=_PASSED_ON, options_metavar="")
def launch(arguments: _Arguments = None) -> None:
    """Start run, train or extend in several processes: first options of `accelerate launch`, then the command."""
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
    """Build a self-contained page, figures and tables from results files, or compare two models."""
    labels = _pairs(label or [], "--label OLD=NEW")
    where = {"hub_results": hub_results, "wandb": wandb, "trackio": trackio}
    if any(where.values()) and (watch or compare):
        raise UserError(
            "--watch and --compare cannot be combined with --hub-results, --wandb or --trackio: remove one of them."
        )
    if compare is not None:
        page_options = {"--watch": watch, "--only": only, "--baseline": baseline, "--title": title, "--paper": paper}
        if conflicting := [name for name, value in page_options.items() if value]:
            raise UserError(
                f"--compare prints a comparison and builds no page: remove it, or remove {', '.join(conflicting)}."
            )
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
        raise UserError(f"{option} needs --compare A B: name the two models to compare.")
    if not paths:
        raise UserError("There are no results to show: name at least one results file or folder.")

    def build() -> Path:
        page_options: dict[str, Any] = {"baseline": baseline, "only": only or [], "axis": axis, "within_nats": within}
        page_options |= {"paper": paper, "figures": figure or []}
        page = _build_report(paths, output, title, labels=labels, replace=replace, **page_options)
        if any(where.values()):
            datasets = _pairs(hub_dataset or [], "--hub-dataset TASK=OWNER/NAME")
            chosen = {"labels": labels, "only": only or [], "datasets": datasets, "replace": replace}
            _load("sbeval.reports.publish", "publish")(paths, **where, **chosen)
        if watch:  # without --watch, the last line names the page
            print(f"The page is {page.resolve()}", flush=True)
        return page

    if watch:
        _keep_building(paths, build)
    else:
        print_next_step(f"open {build().resolve().as_uri()} in a browser")


def _keep_building(paths: list[Path], build: Callable[[], Path]) -> None:
    print("Watching for results files; Ctrl-C ends it.", flush=True)

    def build_or_print_error() -> Path | None:
        try:
            return build()
        except UserError as error:  # a results file may be incomplete
            print(error, file=sys.stderr, flush=True)
            return None

    try:
        for _ in _load("sbeval.reports", "watch")(paths, build_or_print_error):
            pass
    except EndedBySignal as ended:
        if ended.signal is not signal.SIGINT:
            raise
        print("Watching ended.")


@app.command(context_settings=_PASSED_ON, options_metavar="")
def inspect(arguments: _Arguments = None) -> None:
    """Print facts about a checkpoint, its memory and the time of tasks, without loading its weights."""

    def share(*windows: Any, **options: Any) -> Any:
        return _load("sbeval.model_adapters.score.nested", "share_windows")(*windows, **options)

    def test(**model: Any) -> Any:
        model = {"device": _load("sbeval.inspection.memory", "device_here")(), **model}
        session = _load("sbeval.model_adapters.lm", "StickBreakingLM")(**model).session
        return session and session.self_test

    _load("sbeval.inspection.command", "inspect_command")(arguments or ["--help"], check_run, share, test)


@app.command(context_settings=_PASSED_ON, options_metavar="")
def plan(arguments: _Arguments = None) -> None:
    """Say which differences a number of documents shows, how many one needs, and what they cost."""

    def share(*windows: Any, **options: Any) -> Any:
        return _load("sbeval.model_adapters.score.nested", "share_windows")(*windows, **options)

    def inspect_checkpoint(checkpoint: str, **options: Any) -> Any:
        return _load("sbeval.inspection.command", "inspect")(checkpoint, check=check_run, share=share, **options)

    def read_earlier(*results: Any) -> Any:
        return _load("sbeval.reports.spreads", "earlier_spreads")(*results)

    def expand(names: Any) -> Any:
        names = list(names)
        _load("sbeval.tasks.packaged", "check_names")(names)
        return _load("sbeval.tasks.packaged", "expand_names")(names)

    _load("sbeval.planning.command", "plan_command")(arguments or ["--help"], read_earlier, expand, inspect_checkpoint)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder or hub id of a checkpoint of any stick-breaking format.")],
    destination: Annotated[Path, typer.Argument(help="New or empty folder to write to.")],
    kv_expand: Annotated[Literal["auto", "interleave", "tile"], _KV_EXPAND] = "auto",
    dtype: Annotated[str, _DTYPE] = "auto",
    replace: _Replace = False,
) -> None:
    """Convert a released checkpoint to this project's format, with its tokenizer."""
    _load("sbeval.hub_names", "check_name")(source, "a checkpoint", file="config.json")
    destination = _load("sbeval.hub_names", "local_path")(destination)
    _load("sbeval.model_adapters.open.arguments", "check_dtypes")({"dtype": dtype})
    options = {"dtype": dtype, "kv_expand": kv_expand, "replace": replace}
    loaded = _load("sbeval.checkpoints", "convert_checkpoint")(source, destination, **options)
    print(f"Converted {source} (format {loaded.format}) to {destination.resolve()}")
    print_next_step(evaluation_of_folder(destination))


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page.")] = Path("report"),
    results: Annotated[Path, typer.Option(help="Folder for lm-eval's results files.")] = Path("results/demo"),
    text: Annotated[Path | None, _TEXT] = None,
    replace: _Replace = False,
) -> None:
    """Evaluate the two shipped checkpoints past their training length and build a page.

    A second page, in its subfolder `extension`, shows stored results from before and after context extension.
    """
    if text is not None:
        _load("sbeval.tasks.user_options", "check_options")((), {"data_path": str(text)})
    for page_folder in () if replace else (output, output / "extension"):
        _load("sbeval.reports", "check_output_folder")(page_folder)

    def build_pages(folder: Path) -> Path:
        title, labels = (_load("sbeval.demo.extension", name) for name in ("TITLE", "LABELS"))
        with tempfile.TemporaryDirectory() as stored:
            _load("sbeval.demo.extension", "unpack")(Path(stored))
            stored_page = _build_report([Path(stored)], output / "extension", title, labels=labels, replace=replace)
            print(f"The page with stored results is {stored_page.resolve()}", flush=True)
        return _build_report([folder], output, "Stick-breaking and RoPE past their training length", replace=replace)

    page: Path = _load("sbeval.demo.evaluation", "evaluate")(results, text=text, build_pages=build_pages)
    yours = EVALUATE.format("FOLDER").replace("sbeval", _load("sbeval.demo.evaluation", "program")(), 1)
    print_next_step(f"open {page.resolve().as_uri()} in a browser; your own model: {yours}")


@app.command(context_settings=_PASSED_ON, options_metavar="")
def train(arguments: _Arguments = None) -> None:
    """Train a small model from a recipe or on your own text, or resume its training."""
    results = _load("sbeval.training.command", "train_command")(arguments or ["--help"])
    if results is not None:
        page = _build_report([results], results.parent / "report", None)
        print_next_step(f"open {page.resolve().as_uri()} in a browser")


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


def check_run(run: Any) -> bool:
    """Checks that a run can start, before torch is imported; returns whether lm-eval's own tasks are needed.

    Raises:
        UserError: a task, an option or the model cannot be used.
    """
    _load("sbeval.tasks.packaged", "check_names")(run.tasks, run.folders)
    if not run.tasks:
        raise UserError("--tasks names no task: `lm_eval ls tasks` lists them.")
    _load("sbeval.tasks.packaged", "check_model")(run.model, run.tasks)
    if run.model == "sb":
        _load("sbeval.model_adapters.open.arguments", "check_early")(run.model_args, batch_size=run.batch_size)
    else:
        _load("sbeval.model_adapters.open.arguments", "refuse_command_options")(run.model_args)
        if run.model in _HF:
            _load("sbeval.model_adapters.open.arguments", "check_names")(run.model_args, of_hf=True)
    _load("sbeval.tasks.user_options", "check_options")(run.tasks, run.metadata, run.model_args)
    _load("sbeval.tasks.user_options", "check_keys")(run.tasks, run.metadata.keys() - run.model_args.keys())
    if run.model in ("sb", *_HF):
        _load("sbeval.model_adapters.open.arguments", "check_hub_id")(run.model_args)
    return not _load("sbeval.tasks.packaged", "are_all_here")(run.tasks, run.folders)


def find_finished(run: Any) -> Any:
    """Returns the finished results in the output folder that a run continues, with a sentence about each."""
    return _load("sbeval.tasks.perplexity.continuing", "find_finished")(
        run.tasks,
        model=run.model,
        model_args=run.model_args,
        metadata=run.metadata,
        limit=run.limit,
        output_path=run.output_path,
    )


def _pairs(arguments: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for pair in arguments:
        left, equals, right = pair.partition("=")
        if not (left and equals and right):
            raise UserError.expected(option, found=f"{pair!r}", remedy="write both names with = between them")
        pairs[left] = right
    return pairs


def _build_report(paths: list[Path], output: Path, title: str | None, **options: Any) -> Path:
    return Path(_load("sbeval.reports", "build_report")(paths, output, title=title, **options))


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
