"""What `--hub-results`, `--wandb` and `--trackio` of `sbeval report` do, once the page is there."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from sbeval.reports.analyse.selection import restrict
from sbeval.reports.build import load_results
from sbeval.reports.publish.curves import log_curves
from sbeval.reports.publish.hub import write_hub_results


def publish(
    paths: Iterable[Path],
    *,
    hub_results: Path | None = None,
    wandb: str | None = None,
    trackio: str | None = None,
    datasets: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    replace: bool = False,
) -> None:
    """Publishes results, every training seed by itself, and says what was written.

    Args:
        paths: folders walked for result files, or result files.
        hub_results: folder for the hub's evaluation result files, None for none.
        wandb: project of Weights & Biases, None for none.
        trackio: project of trackio, None for none.
        datasets: names of tasks to data sets of the hub, for tasks whose results name none.
        labels: names to show in place of the checkpoints' own.
        only: names or patterns of models and tasks; everything if empty.
        replace: move what lies in the way of `hub_results` aside.

    Raises:
        UserError: nothing to publish, a package is missing, or something cannot be written.
    """
    results = restrict(load_results(paths, labels=labels), only)
    if hub_results is not None:
        written = write_hub_results(results, hub_results, datasets=datasets or {}, replace=replace)
        print(f"files for the hub, {len(written.files)} in all, are in {hub_results}, a folder for each model")
        if written.without_dataset:
            print(
                f"left out, since their results name no data set of the hub: {', '.join(written.without_dataset)} "
                "(--hub-dataset TASK=OWNER/NAME names one)"
            )
    if wandb is not None:
        print(f"wandb has the curves of {', '.join(log_curves(results, 'wandb', project=wandb))}")
    if trackio is not None:
        print(f"trackio has the curves of {', '.join(log_curves(results, 'trackio', project=trackio))}")
