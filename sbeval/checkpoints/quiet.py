"""Context managers that silence transformers' log and progress bars."""

import contextlib
import logging
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Switches transformers' progress bars off, which would break other lines of output."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' log and progress bars while sbeval itself checks and reports the same problems."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with without_bars():
            yield
    finally:
        transformers_logging.set_verbosity(before)
