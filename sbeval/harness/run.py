"""`sbeval run`: calls lm-eval's own `run` command in this process, with the model `sb` and the packaged tasks."""

import argparse
import contextlib
import errno
import importlib
import os
import shlex
import shutil
import sqlite3
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lm_eval._cli import HarnessCLI

from sbeval import registered
from sbeval.errors import UserError
from sbeval.harness.options import (
    RunOptions,
    check_options,
    metadata_of,
    option_errors_explained,
    parse,
    run_options,
    with_configuration,
)
from sbeval.keeping.writing import writing_to
from sbeval.processes import ranks
from sbeval.processes.ending import reporting_errors
from sbeval.processes.garbage import collections_paused
from sbeval.processes.next_step import print_next_step
from sbeval.results.saving import saved_whole
from sbeval.results.terminal import compact_table
from sbeval.settings import Settings, described
from sbeval.task_metadata import say_sources


def run(
    arguments: Sequence[str],
    check: Callable[[RunOptions], bool] | None = None,
    find_finished: Callable[[RunOptions], Any] | None = None,
) -> None:
    """Runs `lm_eval run` with these arguments, the model `sb` and the packaged tasks.

    Args:
        arguments: the command line after `sbeval run`.
        check: called before torch is imported. It raises a `UserError` for a run that cannot start, and returns whether
            lm-eval's own tasks are needed, whose thousands of files take ten seconds to read.
        find_finished: looks for finished results that the run continues.

    Raises:
        UserError: an option, the model or a task cannot be used.
    """
    with collections_paused():
        chosen = parse(arguments)
        lm_eval_tasks_needed = check is None or check(run_options(vars(chosen)))
    say_sources(metadata_of(vars(chosen)))
    check_response_cache(vars(chosen).get("use_cache"))
    if find_finished is not None:
        continue_finished(chosen, vars(chosen), find_finished)
    importlib.import_module("lm_eval.utils").setup_logging()
    output = vars(chosen).get("output_path")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compact_tables())
        with collections_paused():
            stack.enter_context(_machine_described_early())  # imports torch
        stack.enter_context(_model_imported_without_collections())
        if output and {os.environ.get(rank, "0") for rank in ("RANK", "LOCAL_RANK")} == {"0"}:
            chosen.output_path = stack.enter_context(saved_whole(output))
        if not lm_eval_tasks_needed:
            stack.enter_context(registered.packaged_tasks_alone())
        stack.enter_context(option_errors_explained())
        chosen.func(chosen)
    if output:
        print_next_step(f"sbeval report {shlex.quote(str(output))}")
    else:
        print_next_step(
            "the same with `--output_path results` keeps these numbers, `sbeval report results` makes a page of them"
        )


def run_plain(
    chosen: argparse.Namespace,
    evaluate: Callable[[], None],
    check: Callable[[RunOptions], Any],
    find_finished: Callable[[RunOptions], Any],
) -> None:
    """Runs a plain `lm_eval` command. If its model is `sb`, it has the checks and error messages of `sbeval run`.

    Args:
        chosen: lm-eval's parsed arguments.
        evaluate: lm-eval's own command.
        check: as in `run`.
        find_finished: as in `run`.

    Raises:
        SystemExit: as in `reporting_errors`.
        UserError: the `--config` file cannot be read.
    """
    options = vars(chosen)
    try:
        options = with_configuration(options)
    except UserError:
        if options.get("model") == registered.MODEL_NAME:
            raise
    if options.get("model") != registered.MODEL_NAME:
        return evaluate()
    with reporting_errors():
        check_options(options)
        check(run_options(options))
        say_sources(metadata_of(options))
        check_response_cache(options.get("use_cache"))
        continue_finished(chosen, options, find_finished)
        with option_errors_explained():
            evaluate()


def continue_finished(
    chosen: argparse.Namespace, options: Mapping[str, Any], find_finished: Callable[[RunOptions], Any]
) -> None:
    """Makes tasks score the same targets as finished results in the output folder, and prints a sentence for each.

    Args:
        chosen: the parsed arguments; their metadata gets `continues` for each task that has such results.
        options: these arguments by name, with those of a `--config` file.
        find_finished: returns the results file of each task, and the sentences.

    Raises:
        UserError: a task cannot score the targets of its finished results, so its numbers would not be one curve.
    """
    run = run_options(options)
    if run.output_path is None or run.samples:
        return
    finished = find_finished(run)
    for sentence in finished.sentences:
        ranks.print_on_rank_0(sentence)
    if finished.files:
        metadata = metadata_of(options)
        chosen.metadata = metadata | {
            task: {**(metadata.get(task) or {}), "continues": str(file)} for task, file in finished.files.items()
        }


@contextlib.contextmanager
def _compact_tables() -> Iterator[None]:
    """Inside this context, lm-eval prints results by context length, not one row for each number."""
    utils: Any = importlib.import_module("lm_eval.utils")
    original = utils.make_table

    def make_table(results: Any, column: str = "results", *args: Any, **kwargs: Any) -> str:
        return compact_table(results, lambda rest: original(rest, column, *args, **kwargs), column)

    utils.make_table = make_table
    try:
        yield
    finally:
        utils.make_table = original


@contextlib.contextmanager
def _model_imported_without_collections() -> Iterator[None]:
    """Inside this context, lm-eval imports the class of a model while the garbage collector is paused."""
    registry: Any = importlib.import_module("lm_eval.api.registry")
    original = registry.get_model

    def get_model(*args: Any, **kwargs: Any) -> Any:
        with collections_paused():
            return original(*args, **kwargs)

    registry.get_model = get_model
    try:
        yield
    finally:
        registry.get_model = original


@contextlib.contextmanager
def _machine_described_early() -> Iterator[None]:
    """Describes the machine while the run starts; lm-eval would do so at its end, with a dozen programs in turn."""
    collect_env: Any = importlib.import_module("torch.utils.collect_env")
    describe = collect_env.get_pretty_env_info
    described: list[str] = []

    def describe_early() -> None:
        with contextlib.suppress(Exception):  # lm-eval handles the error when it asks
            described.append(describe())

    thread = threading.Thread(target=describe_early, daemon=True)
    thread.start()

    def get_pretty_env_info() -> str:
        thread.join()
        return described[0] if described else str(describe())

    collect_env.get_pretty_env_info = get_pretty_env_info
    try:
        yield
    finally:
        collect_env.get_pretty_env_info = describe


def help_text(adapter_options: type[Settings], metadata: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Returns the help of `sbeval run`: lm-eval's options, the model's arguments, and the metadata by kind of task."""
    parser = HarnessCLI()._subparsers.choices["run"]
    parser.usage = "sbeval run --model_args pretrained=CKPT --tasks TASK,TASK --output_path DIR [options]"
    parser.description = (
        "Evaluate a model: `lm_eval run` with the model sb and the packaged tasks; --output_path also logs samples."
    )
    parser.epilog = None
    our_help = {
        "model": f"Model name (default: {registered.MODEL_NAME}, which loads every model that hf loads)",
        "batch_size": "Batch size: a whole number, or auto (default: auto, as large as fits the device)",
        "tasks": "Names of tasks and groups, separated by commas or spaces; `lm-eval ls tasks` lists them, and "
        "`sbeval tasks` prints the folder of the packaged ones",
    }
    for action in parser._actions:
        action.help = our_help.get(action.dest, action.help)
    blocks = [parser.format_help().rstrip()]
    width = max(60, shutil.get_terminal_size().columns - 2)
    model_title = "--model_args of sb, in addition to pretrained, dtype, max_length and all others of hf"
    task_blocks = [(f"--metadata of {tasks}", keys) for tasks, keys in metadata]
    for title, lines in ((model_title, described(adapter_options)), *task_blocks):
        blocks.append(f"\n{title}:")
        for name, meaning in lines:
            first = f"  {name:<21} " if len(name) < 22 else f"  {name}\n{'':24}"
            blocks.append(textwrap.fill(meaning, width, initial_indent=first, subsequent_indent=" " * 24))
    return "\n".join(blocks)


def check_response_cache(name: str | None) -> None:
    """Checks that lm-eval can write its response cache to the file that `--use_cache` names.

    Raises:
        UserError: the file is not a database, is a database with other tables, or cannot be opened or written to.
    """
    if not name:
        return
    file = Path(f"{name}_rank{os.environ.get('LOCAL_RANK', '0')}.db")
    other = "name another --use_cache"
    with writing_to(file.parent, "answers", remedy=other), tempfile.TemporaryFile(dir=file.parent):
        if file.exists() and not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not file.exists() or file.stat().st_size == 0:
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise UserError(f"{file} cannot be read as a response cache ({error}): {other}.") from error
    if tables - {"unnamed"}:
        raise UserError(f"{file} is a database, but not a response cache: {other}.")
