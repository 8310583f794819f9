"""Reads and checks the options of a run: lm-eval's command line and its `--config` file."""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import logging
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from lm_eval._cli import HarnessCLI
from lm_eval._cli.utils import key_val_to_dict, try_parse_json

from sbeval import registered
from sbeval.checkpoints.facts import longest_input_tokens
from sbeval.errors import UserError, brief, first_line
from sbeval.foreign_files import parse_json, read_json_object, read_yaml
from sbeval.hub_names import local_path
from sbeval.settings import Expected, Limit, Names, Text, as_counts, as_whole, read_value
from sbeval.task_metadata import has_text_keys, with_environment


def _arguments(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value)
    if not has_text_keys(value) and not (isinstance(value, str) and ("=" in value or not value)):
        raise ValueError
    return value


def _tasks(value: Any) -> Any:
    for entry in value if isinstance(value, list) else [value]:
        # lm-eval also accepts the definition of a task, a mapping
        if not isinstance(entry.get("task") if isinstance(entry, Mapping) else entry, str):
            raise ValueError
    return value


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    return [as_whole(number, 0) for number in value]


_Numbers = Annotated[list[int], Expected("a list of whole numbers of at least 0", _numbers)]
_Arguments = Annotated[Any, Expected("a mapping whose keys are text, or text such as key=value,key=value", _arguments)]


# keys of a `--config` file that are checked here; lm-eval checks the others
_CONFIGURED = {
    "model": Text,
    "model_args": _Arguments,
    "metadata": _Arguments,
    "tasks": Annotated[Any, Expected("a list of names", _tasks)],
    "include_path": Names,
    "limit": Limit,
}


# lm-eval's functions whose exceptions are about the user's options
_REFUSES = ("lm_eval._cli.", "lm_eval.evaluator.simple_evaluate", "lm_eval.tasks._", "lm_eval.tasks.manager.")
# exceptions that come from bugs and not from options, except for an unknown keyword argument
_DEFECTS = (OSError, AttributeError, TypeError, KeyError)


class RunOptions(NamedTuple):
    """The options of a run from the command line and its `--config` file, before lm-eval checks them.

    Attributes:
        model: lm-eval's name of the model.
        model_args: the model's arguments.
        tasks: names and patterns of tasks and groups.
        metadata: the metadata that tasks get: the model's arguments, `--metadata` and `SBEVAL_METADATA`.
        folders: folders of `--include_path`.
        batch_size: as the user wrote it.
        device: as the user wrote it.
        output_path: folder or file for the results, None if they are only printed.
        limit: largest number of documents of each task, or, below 1, a fraction of them; None means all.
        samples: whether `--samples` chooses the documents.
    """

    model: str
    model_args: Mapping[str, Any]
    tasks: Sequence[str]
    metadata: Mapping[str, Any]
    folders: Sequence[str]
    batch_size: Any = None
    device: Any = None
    output_path: str | None = None
    limit: float | None = None
    samples: bool = False


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line with lm-eval's parser, and adds the `--config` file's options and defaults.

    The defaults are the model `sb`; `--log_samples` with an output path, since paired differences need the samples; and
    for `sb`, `max_length` if a requested context length is longer than the model's, and the batch size "auto".

    Raises:
        UserError: an option is unknown, or its value is invalid.
    """
    cli = HarnessCLI()
    options_of_run = cli._subparsers.choices["run"]
    for parser in (cli._parser, options_of_run):
        parser.error = functools.partial(_refuse, options_of_run)
    with option_errors_explained():
        chosen: argparse.Namespace = cli._parser.parse_args(["run", *arguments])
    options = vars(chosen)
    options |= with_configuration(options)
    check_options(options)
    if not chosen.model:
        chosen.model = registered.MODEL_NAME
    if options.get("output_path"):
        chosen.log_samples = True
    if chosen.model == registered.MODEL_NAME:
        _make_room(chosen)
        options.setdefault("batch_size", "auto")
    return chosen


def run_options(options: Mapping[str, Any]) -> RunOptions:
    """Returns the options of a run from a configuration of lm-eval, or from its parsed arguments by name.

    Raises:
        UserError: `SBEVAL_METADATA` cannot be read, or sets a key to another value.
    """
    read = importlib.import_module("lm_eval.utils").simple_parse_args_string  # a slow import that --help does not need
    arguments = options.get("model_args") or {}
    metadata = metadata_of(options)
    model_args = read(arguments) if isinstance(arguments, str) else arguments
    tasks = options.get("tasks") or []
    folders = options.get("include_path") or []
    return RunOptions(
        model=str(options.get("model") or registered.MODEL_NAME),
        model_args=model_args,
        tasks=[
            name
            for entry in ([tasks] if isinstance(tasks, str) else tasks)
            if isinstance(entry, str)
            for name in entry.split(",")
        ],
        metadata=with_environment({**model_args, **metadata}),
        folders=[str(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)],
        batch_size=options.get("batch_size"),
        device=options.get("device"),
        output_path=str(options["output_path"]) if options.get("output_path") else None,
        limit=options.get("limit"),
        samples=bool(options.get("samples")),
    )


def metadata_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `--metadata` of a configuration of lm-eval as a mapping, without model arguments and environment."""
    read = importlib.import_module("lm_eval.utils").simple_parse_args_string
    metadata = options.get("metadata") or {}
    return dict(read(metadata) if isinstance(metadata, str) else metadata)


def read_mapping(text: str, name: str) -> dict[str, Any]:
    """Reads the value of an option such as --model_args: key=value pairs, or a JSON object.

    `name` is the option's name in the error message.

    Raises:
        UserError: the value is neither.
    """
    try:
        parsed = try_parse_json(text)
        return parsed if isinstance(parsed, dict) else dict(key_val_to_dict(text))
    except ValueError as error:
        raise UserError(
            f"Expected {name} as key=value,... or a JSON object, found {text!r} ({error}): correct it."
        ) from None


@contextlib.contextmanager
def option_errors_explained() -> Iterator[None]:
    """Turns exceptions about options, from lm-eval or an experiment tracker that it starts, into a `UserError`.

    Other exceptions pass unchanged.

    Raises:
        UserError: lm-eval or a tracker rejects an option.
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
        unknown_option = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
        refused = places[-1].startswith(_REFUSES) and (unknown_option or not isinstance(error, _DEFECTS))
        if isinstance(error, MemoryError) or not (refused or any(map(reads_options.match, places))):
            raise
        logging.getLogger("lm_eval.sbeval").debug("lm-eval rejected the options", exc_info=True)
        option = _option_read(error)
        rejected = f"the value of {option}" if option else "the options"
        raise UserError(f"lm-eval rejected {rejected} ({first_line(error)}): correct that.") from error


def _option_read(error: Exception) -> str | None:
    """Returns the option whose value was parsed when the error was raised, as the user wrote it: `--metadata`, `-M`."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        action = frame.f_locals.get("self")
        if isinstance(action, argparse.Action) and action.option_strings:  # argparse counts the sub-command `run` too
            return str(frame.f_locals.get("option_string") or action.option_strings[-1])
    return None


def with_configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with those of their `--config` file added.

    Keys that the file sets to null are ignored here; lm-eval reads the file again and applies them.
    """
    from_command_line = {name: value for name, value in options.items() if value or value == 0}
    from_file = _configured(from_command_line.get("config"))
    from_file = {name: value for name, value in from_file.items() if value is not None}
    return {**options, **from_file, **from_command_line}


def _samples(text: str) -> Mapping[str, Any]:
    """Reads `--samples`: JSON, or the path of a JSON file, in which lm-eval does not expand `~`."""
    with contextlib.suppress(UserError):
        if isinstance(samples := parse_json(text), Mapping):
            return samples
    return read_json_object(Path(text), "a mapping of tasks to samples (--samples)")


def check_options(options: Mapping[str, Any]) -> None:
    """Checks options for which lm-eval would raise a traceback, some of them only after the whole evaluation.

    Raises:
        UserError: a value is invalid, or two options exclude each other.
    """
    if options.get("limit") is not None:
        read_value(Limit, options["limit"], name="--limit")
        if options.get("samples"):
            raise UserError("--samples and --limit exclude each other: remove one of them.")
    samples = options.get("samples") or {}
    if not isinstance(samples, Mapping):
        samples = _samples(str(samples))
    for task, numbers in samples.items():
        read_value(_Numbers, numbers, name=f"--samples of {task}")
    seeds = options.get("seed")
    seeds = seeds if isinstance(seeds, list) else [seeds] * 4  # seeds for Python, numpy, torch and few-shot examples
    for seed, package, least, bits in zip(seeds[1:3], ("numpy", "torch"), (0, -(2**63)), (32, 64), strict=False):
        if isinstance(seed, int) and not least <= seed < 2**bits:
            raise UserError.expected(
                f"a seed for {package} from {least} to {2**bits - 1}", found=brief(seed), remedy="correct --seed"
            )
    local_path(str(options.get("output_path") or ""))
    if (level := options.get("verbosity")) and str(level).upper() not in logging.getLevelNamesMapping():
        raise UserError.expected("--verbosity such as INFO or ERROR", found=brief(level), remedy="correct it")
    if options.get("check_integrity"):
        raise UserError(
            "--check_integrity runs the tests of lm-eval's source tree, which do not include these tasks: remove it."
        )
    for package in ("wandb", "trackio"):
        if options.get(f"{package}_args") and importlib.util.find_spec(package) is None:
            raise UserError(f"--{package}_args needs the package {package}: run pip install {package}.")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raises a `UserError` with argparse's error message and the most similar option."""
    wrong_option = message.rpartition(": ")[2].split()[:1]
    similar = get_close_matches(wrong_option[0], parser._option_string_actions, n=1) if wrong_option else []
    advice = ": `sbeval run --help` lists them."
    if similar and similar != wrong_option:
        advice = f"; did you mean {similar[0]}?"
    raise UserError(f"Expected options of `sbeval run`, found: {message}{advice}")


def _make_room(chosen: argparse.Namespace) -> None:
    """Sets `max_length` to the longest context length of any task, if the model's own maximum is shorter."""
    requested = run_options(vars(chosen))
    task_options = [value for value in requested.metadata.values() if isinstance(value, Mapping)]
    lengths: set[int] = set()
    for options in (requested.metadata, *task_options):
        with contextlib.suppress(ValueError):  # the task itself reports invalid lengths
            lengths.update(as_counts(options.get("context_lengths")))
    if not lengths or "max_length" in requested.metadata:
        return
    if (longest := max(lengths)) > (longest_input_tokens(requested.model_args.get("pretrained")) or 0):
        chosen.model_args = {**requested.model_args, "max_length": longest}
        logging.getLogger("lm_eval.sbeval").info("max_length=%d, the longest requested context length", longest)


def _configured(file: str | None) -> dict[str, Any]:
    """Returns the options of a `--config` file, empty if there is no file."""
    # lm-eval's own reader hangs on YAML aliases that multiply, and answers a mistake with a traceback
    values = {} if file is None else read_yaml(Path(file), "a configuration of lm-eval")
    for name, kind in _CONFIGURED.items():
        if values.get(name) is not None:
            read_value(kind, values[name], name=name, source=str(file))
    return values
