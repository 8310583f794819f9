"""Finds the other ranks of a run before the model is loaded; in a tensor-parallel run, only rank 0 logs at INFO."""

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
    """Sets up logging, finds the other ranks, and starts to watch whether they are alive.

    Call it before the model is loaded.

    Args:
        shares_model: whether the model is tensor parallel (`tp_plan`).

    Raises:
        UserError: an environment variable such as RANK or WORLD_SIZE is missing or wrong.
    """
    log_visibly()
    ranks.find_processes()
    share_passes(shares_model and ranks.several())
    ranks.watch()
    if ranks.is_first_process():
        warn_of_versions()
    elif shares_model:
        logging.disable(logging.INFO)  # otherwise every rank would log the same lines


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Inside this context, turns a failed rendezvous of the ranks into an error that names the address and a remedy.

    Raises:
        UserError: the processes did not meet at MASTER_ADDR:MASTER_PORT.
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
    """Logs once which installed packages have versions that this release was not tested with."""
    if outside := untested():
        logger.warning("this sbeval was not tested with %s: results may differ, or calls may fail", outside)
