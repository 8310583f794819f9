"""lm-eval's own `run` command in this process, with the model and the task folder already set."""

import argparse
import contextlib
import errno
import functools
import importlib.util
import logging
import os
import re
import shlex
import shutil
import sqlite3
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn
from urllib.parse import quote

import lm_eval.utils
from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging, simple_parse_args_string

from sbeval import plugin
from sbeval.checkpoints.facts import longest_input_tokens
from sbeval.commands.ending import say_next, told_in_one_sentence
from sbeval.errors import UserError, first_line, shown
from sbeval.foreign_files import parse_json, read_yaml
from sbeval.keeping.writing import writing_to
from sbeval.results.saving import saved_whole
from sbeval.results.terminal import compact_table
from sbeval.settings import Expected, Limit, Names, Settings, Text, as_counts, described, read_value


def _arguments(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value)
    if not _has_text_keys(value) and not (isinstance(value, str) and ("=" in value or not value)):
        raise ValueError
    return value


def _has_text_keys(value: Any) -> bool:
    """Whether a value is a mapping whose keys, at every level, are text: results files hold nothing else."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and (not isinstance(inner, Mapping) or _has_text_keys(inner))
        for key, inner in value.items()
    )


def _tasks(value: Any) -> Any:
    for entry in value if isinstance(value, list) else [value]:
        # lm-eval takes a task's own definition too
        if not isinstance(entry.get("task") if isinstance(entry, Mapping) else entry, str):
            raise ValueError
    return value


_Arguments = Annotated[Any, Expected("a mapping whose keys are text, or text such as key=value,key=value", _arguments)]
# what is read here of a `--config` file; the rest is lm-eval's to check
_CONFIGURED = {
    "model": Text,
    "model_args": _Arguments,
    "metadata": _Arguments,
    "tasks": Annotated[Any, Expected("a list of names", _tasks)],
    "include_path": Names,
    "limit": Limit,
}


# lm-eval's modules that look at what a user wrote, and do nothing else that fails
_REFUSES = ("lm_eval._cli.", "lm_eval.evaluator", "lm_eval.tasks._", "lm_eval.tasks.manager.")


class Asked(NamedTuple):
    """What the arguments of a run and its `--config` file ask for, before lm-eval has looked at it.

    Attributes:
        tasks: names and patterns of tasks and groups, one by one.
        metadata: what lm-eval hands to the tasks, the model's arguments among it.
        folders: of `--include_path`.
    """

    model: str
    model_args: Mapping[str, Any]
    tasks: Sequence[str]
    metadata: Mapping[str, Any]
    folders: Sequence[str]
    batch_size: Any = None


def run(arguments: Sequence[str], check: Callable[[Asked], bool] | None = None) -> None:
    """Runs `lm_eval run` with these arguments, the model `sb` and the packaged tasks.

    `check` is called before torch is imported; it raises a `UserError` for what cannot run, and returns whether
    lm-eval's own tasks are needed, whose thousands of files take it ten seconds to read.

    Raises:
        UserError: what the model or the tasks found wrong with the input.
    """
    plugin.install()
    chosen = parse(arguments)
    own_tasks_needed = check is None or check(asked(vars(chosen)))
    setup_logging()
    output, answers = (vars(chosen).get(name) for name in ("output_path", "use_cache"))
    if answers:
        check_response_cache(Path(f"{answers}_rank{os.environ.get('LOCAL_RANK', '0')}.db"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compact_tables())
        if output and {os.environ.get(rank, "0") for rank in ("RANK", "LOCAL_RANK")} == {"0"}:
            chosen.output_path = stack.enter_context(saved_whole(output))
        if not own_tasks_needed:
            stack.enter_context(plugin.packaged_tasks_alone())
        stack.enter_context(options_told())
        chosen.func(chosen)
    if output:
        say_next(f"sbeval report {shlex.quote(str(output))}")
    else:
        say_next(
            "the same with `--output_path results` keeps these numbers, `sbeval report results` makes a page of them"
        )


def run_plain(chosen: argparse.Namespace, evaluate: Callable[[], None], check: Callable[[Asked], Any]) -> None:
    """Runs what a plain `lm_eval` was asked for; with the model `sb` it refuses and ends as `sbeval run` does.

    Raises:
        SystemExit: as `told_in_one_sentence` does.
        UserError: its configuration cannot be read.
    """
    options = vars(chosen)
    try:
        options = _with_configuration(options)
    except UserError:
        if options.get("model") == plugin.MODEL_NAME:
            raise
    if options.get("model") != plugin.MODEL_NAME:
        return evaluate()
    with told_in_one_sentence():
        _check_options(options)
        check(asked(options))
        with options_told():
            evaluate()


@contextlib.contextmanager
def options_told() -> Iterator[None]:
    """Says in one sentence what lm-eval, or a tracker that it starts, finds wrong with its options.

    Raises:
        UserError: that is so; all else that is raised stays what it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        places = [
            f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
            for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        reads_options = re.compile(r"lm_eval\.(config\.|loggers\..*\.__init__$)")
        if not any(map(reads_options.match, places)) and not places[-1].startswith(_REFUSES):
            raise
        raise UserError(f"Expected options as lm-eval reads them, found: {first_line(error)}; correct that.") from error


@contextlib.contextmanager
def _compact_tables() -> Iterator[None]:
    """Within it, lm-eval prints results by context length rather than one row a number."""
    original = lm_eval.utils.make_table

    def make_table(results: Any, column: str = "results", *args: Any, **kwargs: Any) -> str:
        return compact_table(results, lambda rest: original(rest, column, *args, **kwargs), column)

    lm_eval.utils.make_table = make_table
    try:
        yield
    finally:
        lm_eval.utils.make_table = original


def help_text(adapter_options: type[Settings], metadata: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> str:
    """Returns the help of `sbeval run`: lm-eval's options, the model's own, and metadata by kind of task and key."""
    parser = HarnessCLI()._subparsers.choices["run"]
    parser.usage = "sbeval run --model_args pretrained=CKPT --tasks TASK,TASK --output_path DIR [options]"
    parser.description = (
        "Evaluate: `lm_eval run` with the model sb, the packaged tasks, and samples logged beside an output path."
    )
    parser.epilog = None
    of_sb = {
        "model": f"Model name (default: {plugin.MODEL_NAME}, which loads what hf loads)",
        "batch_size": "Batch size: a whole number, or auto (default: what fits the device)",
        "tasks": "Names of tasks and groups, with commas or spaces between them; `lm-eval ls tasks` and "
        "`sbeval tasks` say where there are more",
    }
    for action in parser._actions:
        action.help = of_sb.get(action.dest, action.help)
    blocks = [parser.format_help().rstrip()]
    width = max(60, shutil.get_terminal_size().columns - 2)
    of_model = "--model_args of sb, beside pretrained, dtype, max_length and all others of hf"
    of_tasks = [(f"--metadata of {tasks}", keys) for tasks, keys in metadata]
    for title, lines in ((of_model, described(adapter_options)), *of_tasks):
        blocks.append(f"\n{title}:")
        for name, meaning in lines:
            first = f"  {name:<21} " if len(name) < 22 else f"  {name}\n{'':24}"
            blocks.append(textwrap.fill(meaning, width, initial_indent=first, subsequent_indent=" " * 24))
    return "\n".join(blocks)


def check_response_cache(file: Path) -> None:
    """Refuses to have lm-eval write its responses into a file that holds something else, or where nothing can be.

    Raises:
        UserError: the file is no database, or one with other tables, or it cannot be opened or written.
    """
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
        raise UserError(f"Expected a response cache at {file}, found: {error}; {other}.") from error
    if tables - {"unnamed"}:
        raise UserError(f"Expected a response cache at {file}, found a database of something else: {other}.")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses as lm-eval does, and adds what the `--config` file says, and what neither says.

    That is the model `sb`, `--log_samples` where there is an output path, since paired differences need the samples,
    `max_length` where longer contexts are asked for than the model would take, and batches of the model's own choosing.
    """
    cli = HarnessCLI()
    options_of_run = cli._subparsers.choices["run"]
    for parser in (cli._parser, options_of_run):
        parser.error = functools.partial(_refuse, options_of_run)
    with options_told():
        chosen: argparse.Namespace = cli._parser.parse_args(["run", *arguments])
    options = vars(chosen)
    options |= _with_configuration(options)
    _check_options(options)
    if not chosen.model:
        chosen.model = plugin.MODEL_NAME
    if options.get("output_path"):
        chosen.log_samples = True
    if chosen.model == plugin.MODEL_NAME:
        _make_room(chosen)
        options.setdefault("batch_size", "auto")
    return chosen


def _with_configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with those of their `--config` file, which lm-eval reads again, for what it says to be null."""
    given = {name: value for name, value in options.items() if value or value == 0}
    configured = {name: value for name, value in _configured(given.get("config")).items() if value is not None}
    return {**options, **configured, **given}


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses options of lm-eval that it answers with a traceback, for some after the whole evaluation."""
    if options.get("limit") is not None:
        read_value(Limit, options["limit"], name="--limit")
        if options.get("samples"):
            raise UserError("Expected --samples or --limit, found both: leave one out.")
    seeds = options.get("seed")
    seeds = seeds if isinstance(seeds, list) else [seeds] * 4  # of Python, numpy, torch and the examples
    for seed, package, bits in zip(seeds[1:3], ("numpy", "torch"), (32, 63), strict=False):
        if isinstance(seed, int) and not 0 <= seed < 2**bits:
            raise UserError(
                f"Expected a seed of {package} from 0 to {2**bits - 1}, found {shown(seed)}: correct --seed."
            )
    if (level := options.get("verbosity")) and str(level).upper() not in logging.getLevelNamesMapping():
        raise UserError(f"Expected --verbosity such as INFO or ERROR, found {shown(level)}: correct it.")
    if options.get("check_integrity"):
        raise UserError(
            "Expected a run without --check_integrity, found it: its tests lie beside lm-eval's source, and know none "
            "of these tasks: leave it out."
        )
    for package in ("wandb", "trackio"):
        if options.get(f"{package}_args") and importlib.util.find_spec(package) is None:
            raise UserError(f"Expected the package {package} for --{package}_args, found none: install it.")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Says what is wrong with the options as everything else is said, with the nearest one that there is."""
    given = message.rpartition(": ")[2].split()[:1]
    near = get_close_matches(given[0], parser._option_string_actions, n=1) if given else []
    advice = f"; did you mean {near[0]}?" if near and near != given else ": `sbeval run --help` lists them."
    raise UserError(f"Expected options of `sbeval run`, found: {message}{advice}")


def asked(said: Mapping[str, Any]) -> Asked:
    """Returns what a configuration of lm-eval, or its parsed arguments by name, asks for."""
    given = (said.get("model_args") or {}, said.get("metadata") or {})
    model_args, metadata = (simple_parse_args_string(text) if isinstance(text, str) else text for text in given)
    tasks, folders = said.get("tasks") or [], said.get("include_path") or []
    return Asked(
        model=str(said.get("model") or plugin.MODEL_NAME),
        model_args=model_args,
        tasks=[
            name
            for entry in ([tasks] if isinstance(tasks, str) else tasks)
            if isinstance(entry, str)
            for name in entry.split(",")
        ],
        metadata={**model_args, **metadata},
        folders=[str(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)],
        batch_size=said.get("batch_size"),
    )


def _make_room(chosen: argparse.Namespace) -> None:
    """Sets `max_length` to the longest context length asked for by any task, where the model would stop before it."""
    wanted = asked(vars(chosen))
    of_one_task = [value for value in wanted.metadata.values() if isinstance(value, Mapping)]
    lengths: set[int] = set()
    for options in (wanted.metadata, *of_one_task):
        with contextlib.suppress(ValueError):  # the task says what is wrong with them
            lengths.update(as_counts(options.get("context_lengths")))
    if not lengths or "max_length" in wanted.metadata:
        return
    longest = max(lengths)
    if longest > (longest_input_tokens(wanted.model_args.get("pretrained")) or 0):
        chosen.model_args = {**wanted.model_args, "max_length": longest}
        logging.getLogger("lm_eval.sbeval").info("max_length=%d, the longest context length asked for", longest)


def _configured(file: str | None) -> dict[str, Any]:
    """Returns what a `--config` file says, nothing where there is none."""
    # lm-eval's own reader waits for ever on aliases that multiply, and answers a slip with a traceback
    values = {} if file is None else read_yaml(Path(file), "a configuration of lm-eval")
    for name, kind in _CONFIGURED.items():
        if values.get(name) is not None:
            read_value(kind, values[name], name=name, source=str(file))
    return values
