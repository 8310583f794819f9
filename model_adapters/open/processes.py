"""How a process that opens a model finds the other processes of its run, and what each of them logs."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator

import torch

from sbeval.errors import UserError, first_line, log_visibly
from sbeval.fingerprint.parts import untested
from sbeval.model_adapters.batching import share_passes
from sbeval.processes import ranks

logger = logging.getLogger(__name__)


def join_processes(*, shares_model: bool) -> None:
    """Sets up logging and the watch over other processes, before the model is loaded.

    Args:
        shares_model: whether the processes share one model by a tensor plan.

    Raises:
        UserError: environment variables for several processes are missing or wrong.
    """
    log_visibly()
    ranks.find_processes()
    share_passes(shares_model and ranks.several())
    ranks.watch()
    if ranks.is_first_process():
        warn_of_versions()
    elif shares_model:
        logging.disable(logging.INFO)  # every process would log the same lines


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Explains why processes could not connect.

    Raises:
        UserError: naming the address at which they should have met.
    """
    try:
        yield
    except torch.distributed.DistNetworkError as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        expected = f"Expected {os.environ.get('WORLD_SIZE', '1')} processes to meet at {place}"
        remedy = "choose another port (--master-port of torchrun, --main_process_port of accelerate)"
        raise UserError(f"{expected}, but {first_line(error)}: {remedy}.") from error


@functools.cache
def warn_of_versions() -> None:
    """Logs once which installed packages this release was not tested with."""
    if outside := untested():
        logger.warning("this sbeval was not tested with %s: numbers may differ, or calls fail", outside)
