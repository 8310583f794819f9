"""The options of `sbeval inspect`."""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sbeval.commands.ending import EVALUATE, say_next
from sbeval.hub_names import check_name

_CHECKPOINT = typer.Argument(metavar="CHECKPOINT", help="Folder or hub id, downloaded whole as a run would.")
_MEMORY = typer.Option(metavar="SIZE", help="Memory of a GPU, such as 80GiB, in place of what is free here.")
_LENGTHS = typer.Option(metavar="L,L,...", help="Lengths in tokens to show memory for.")
_DTYPE = typer.Option(help="Type of the loaded weights; auto keeps the checkpoint's.")
_KV_EXPAND = typer.Option(help="How grouped heads of dolomite-engine share keys and values.")
_TASKS = typer.Option(metavar="TASK,TASK,...", help="Count the requests and tokens of these tasks.")
_METADATA = typer.Option(help="Options of the tasks, as `sbeval run` takes them.")
_MODEL_ARGS = typer.Option(
    "--model_args", "--model-args", metavar="KEY=VALUE,...", help="Arguments of the model, as `sbeval run` takes them."
)
_LIMIT = typer.Option(help="Documents of a task, or a share of them.")
_MEASURED = typer.Option(metavar="RESULTS.json", help="Estimate time by the tokens a second this results file records.")
_MEASURE = typer.Option("--measure", help="Estimate time by loading the model and running some documents of each task.")


def inspect_command(arguments: Sequence[str], check: Callable[..., bool], share: Callable[..., Any]) -> None:
    """Runs the command.

    Args:
        arguments: what follows `sbeval inspect`.
        check: what `sbeval run` checks of its tasks.
        share: the adapter's `share_windows`.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command()
    def inspect(
        checkpoint: Annotated[str, _CHECKPOINT],
        memory: Annotated[str | None, _MEMORY] = None,
        lengths: Annotated[str | None, _LENGTHS] = None,
        dtype: Annotated[str, _DTYPE] = "auto",
        kv_expand: Annotated[Literal["auto", "interleave", "tile"], _KV_EXPAND] = "auto",
        tasks: Annotated[str | None, _TASKS] = None,
        metadata: Annotated[str | None, _METADATA] = None,
        model_args: Annotated[str | None, _MODEL_ARGS] = None,
        limit: Annotated[float | None, _LIMIT] = None,
        measured: Annotated[Path | None, _MEASURED] = None,
        measure: Annotated[bool, _MEASURE] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Say what a checkpoint is, what memory it needs and how long tasks take, without loading its weights.

        Exit code 1 where it cannot be loaded.
        """
        started = time.perf_counter()  # imports are a part of what a run takes
        check_name(checkpoint, "a checkpoint", file="config.json")
        from sbeval.inspection.command import Question, inspect, to_json_text

        question = Question(
            memory=memory,
            lengths=lengths,
            dtype=dtype,
            kv_expand=kv_expand,
            tasks=tasks,
            metadata=metadata,
            model_args=model_args,
            limit=limit,
            measured=measured,
            measure=measure,
        )
        found = inspect(checkpoint, question, check=check, share=share, started=started)
        print(to_json_text(found) if as_json else found.to_text())
        if found.description.format is None:
            raise typer.Exit(1)
        if not as_json:
            say_next(EVALUATE.format(shlex.quote(checkpoint)))

    app(list(arguments), prog_name="sbeval inspect")
