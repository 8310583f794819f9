"""What a run is asked for: lm-eval's options and its `--config` file, and what is wrong with them."""

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
from sbeval.errors import UserError, first_line, shown
from sbeval.foreign_files import parse_json, read_json_object, read_yaml
from sbeval.hub_names import local_path
from sbeval.settings import Expected, Limit, Names, Text, as_counts, as_whole, read_value


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


def _numbers(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    return [as_whole(number, 0) for number in value]


_Numbers = Annotated[list[int], Expected("a list of whole numbers of at least 0", _numbers)]
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
_REFUSES = ("lm_eval._cli.", "lm_eval.evaluator.simple_evaluate", "lm_eval.tasks._", "lm_eval.tasks.manager.")
# no answers to a user, but for an unknown keyword argument
_DEFECTS = (OSError, AttributeError, TypeError, KeyError)


class Asked(NamedTuple):
    """What the arguments of a run and its `--config` file ask for, before lm-eval has looked at it.

    Attributes:
        tasks: names and patterns of tasks and groups, one by one.
        metadata: what lm-eval hands to the tasks, the model's arguments among it.
        folders: of `--include_path`.
        output_path: where results go, None where they are only printed.
        limit: most documents of each task, or their share below 1; None is all of them.
        samples: whether `--samples` chooses the documents.
    """

    model: str
    model_args: Mapping[str, Any]
    tasks: Sequence[str]
    metadata: Mapping[str, Any]
    folders: Sequence[str]
    batch_size: Any = None
    output_path: str | None = None
    limit: float | None = None
    samples: bool = False


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


def asked(said: Mapping[str, Any]) -> Asked:
    """Returns what a configuration of lm-eval, or its parsed arguments by name, asks for."""
    read = importlib.import_module("lm_eval.utils").simple_parse_args_string  # whose import --help does without
    arguments = said.get("model_args") or {}
    metadata = metadata_of(said)
    model_args = read(arguments) if isinstance(arguments, str) else arguments
    tasks, folders = said.get("tasks") or [], said.get("include_path") or []
    return Asked(
        model=str(said.get("model") or registered.MODEL_NAME),
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
        output_path=str(said["output_path"]) if said.get("output_path") else None,
        limit=said.get("limit"),
        samples=bool(said.get("samples")),
    )


def metadata_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `--metadata` of a configuration of lm-eval as a mapping, without the model's arguments."""
    read = importlib.import_module("lm_eval.utils").simple_parse_args_string
    given = said.get("metadata") or {}
    return dict(read(given) if isinstance(given, str) else given)


def read_mapping(text: str, name: str) -> dict[str, Any]:
    """Reads the value of an option such as --model_args as `sbeval run` does: pairs, or a JSON object.

    Raises:
        UserError: it is neither; `name` is the option in the message.
    """
    try:
        parsed = try_parse_json(text)
        return parsed if isinstance(parsed, dict) else dict(key_val_to_dict(text))
    except ValueError as error:
        raise UserError(f"Expected {name} as key=value,... or a JSON object, found {text!r} ({error}).") from None


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
        unknown_option = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
        refused = places[-1].startswith(_REFUSES) and (unknown_option or not isinstance(error, _DEFECTS))
        if isinstance(error, MemoryError) or not (refused or any(map(reads_options.match, places))):
            raise
        logging.getLogger("lm_eval.sbeval").debug("lm-eval does not take the options", exc_info=True)
        option = _option_read(error)
        expected = f"{option} as lm-eval reads it" if option else "options as lm-eval reads them"
        raise UserError(f"Expected {expected}, found: {first_line(error)}; correct that.") from error


def _option_read(error: Exception) -> str | None:
    """Returns the option whose value was read as the error was raised, as the user wrote it: `--metadata`, `-M`."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        action = frame.f_locals.get("self")
        if isinstance(action, argparse.Action) and action.option_strings:  # `run` itself is one without
            return str(frame.f_locals.get("option_string") or action.option_strings[-1])
    return None


def with_configuration(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with those of their `--config` file, which lm-eval reads again, for what it says to be null."""
    given = {name: value for name, value in options.items() if value or value == 0}
    configured = {name: value for name, value in _configured(given.get("config")).items() if value is not None}
    return {**options, **configured, **given}


def _samples(text: str) -> Mapping[str, Any]:
    """Reads JSON, or a file of it where lm-eval looks for one: it knows no `~`."""
    with contextlib.suppress(UserError):
        if isinstance(samples := parse_json(text), Mapping):
            return samples
    return read_json_object(Path(text), "a mapping of tasks to samples (--samples)")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses options of lm-eval that it answers with a traceback, for some after the whole evaluation."""
    if options.get("limit") is not None:
        read_value(Limit, options["limit"], name="--limit")
        if options.get("samples"):
            raise UserError.expected("--samples or --limit", found="both", remedy="leave one out")
    samples = options.get("samples") or {}
    if not isinstance(samples, Mapping):
        samples = _samples(str(samples))
    for task, numbers in samples.items():
        read_value(_Numbers, numbers, name=f"--samples of {task}")
    seeds = options.get("seed")
    seeds = seeds if isinstance(seeds, list) else [seeds] * 4  # of Python, numpy, torch and the examples
    for seed, package, least, bits in zip(seeds[1:3], ("numpy", "torch"), (0, -(2**63)), (32, 64), strict=False):
        if isinstance(seed, int) and not least <= seed < 2**bits:
            raise UserError.expected(
                f"a seed of {package} from {least} to {2**bits - 1}", found=shown(seed), remedy="correct --seed"
            )
    local_path(str(options.get("output_path") or ""))
    if (level := options.get("verbosity")) and str(level).upper() not in logging.getLevelNamesMapping():
        raise UserError.expected("--verbosity such as INFO or ERROR", found=shown(level), remedy="correct it")
    if options.get("check_integrity"):
        raise UserError(
            "Expected a run without --check_integrity, found it: its tests lie beside lm-eval's source, and know none "
            "of these tasks: leave it out."
        )
    for package in ("wandb", "trackio"):
        if options.get(f"{package}_args") and importlib.util.find_spec(package) is None:
            raise UserError.expected(f"the package {package} for --{package}_args", found="none", remedy="install it")


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Says what is wrong with the options as everything else is said, with the nearest one that there is."""
    given = message.rpartition(": ")[2].split()[:1]
    near = get_close_matches(given[0], parser._option_string_actions, n=1) if given else []
    advice = f"; did you mean {near[0]}?" if near and near != given else ": `sbeval run --help` lists them."
    raise UserError(f"Expected options of `sbeval run`, found: {message}{advice}")


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
    if (longest := max(lengths)) > (longest_input_tokens(wanted.model_args.get("pretrained")) or 0):
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
