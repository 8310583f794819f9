"""The `sbeval` command: the rooms of the package put together, each imported when its sub-command runs."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sbeval.errors import UserError

app = typer.Typer(
    name="sbeval",
    help="What happens to a language model when its context grows past its training length?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# for commands whose options are somebody else's
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False}


def main() -> None:
    """Runs the command; an error the user can mend is printed as one sentence and ends with exit code 1."""
    try:
        app()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


@app.command(context_settings=_PASSED_ON, options_metavar="")
def run(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="OPTIONS", help="Options of `lm_eval run`, passed on as they are.")
    ] = None,
) -> None:
    """Evaluate: the options of `lm_eval run`, with the model `sb` and the packaged tasks already set.

    Samples are logged whenever --output_path is given, since paired differences need them.
    """
    _load("sbeval.lm_eval_command", "run")(arguments or ["--help"])


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Results files of lm-eval, or folders that hold some.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for index.html, figures and table.")] = Path(
        "report"
    ),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
) -> None:
    """Turn results files into one self-contained page, figures and a table."""
    _build_report(paths, output, title)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the page.")] = Path("report"),
    results: Annotated[Path, typer.Option(help="Folder for lm-eval's results files.")] = Path("results/demo"),
    text: Annotated[
        Path | None, typer.Option(help="File or folder to read in place of Python's standard library.")
    ] = None,
) -> None:
    """Evaluate the two shipped checkpoints past their training length and build the page."""
    folder = _load("sbeval.demo.evaluation", "evaluate")(results, text=text)
    _build_report([folder], output, "Stick-breaking and RoPE past their training length")


@app.command(context_settings=_PASSED_ON, options_metavar="")
def train(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE [OPTIONS]", help="`sbeval train --help` shows them.")
    ] = None,
) -> None:
    """Train a small model from a recipe, or go on with it."""
    _load("sbeval.training.train", "main")(arguments or ["--help"])


@app.command(context_settings=_PASSED_ON, options_metavar="")
def extend(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="CHECKPOINT [OPTIONS]", help="`sbeval extend --help` shows them.")
    ] = None,
) -> None:
    """Continue training a checkpoint at a longer context."""
    _load("sbeval.training.extend", "main")(arguments or ["--help"])


@app.command()
def tasks() -> None:
    """Print the folder of the packaged tasks, for lm-eval's --include_path."""
    print(_load("sbeval.plugin", "tasks_folder")())


@app.command()
def install_plugin() -> None:
    """Make `lm_eval --model sb` work after an editable install (a plain install does so by itself)."""
    print(_load("sbeval.autoload", "install")())


def _build_report(paths: list[Path], output: Path, title: str | None) -> None:
    page: Path = _load("sbeval.reports.build", "build_report")(paths, output, title=title)
    print(f"The page is {page.resolve()}")


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
