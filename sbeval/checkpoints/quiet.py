"""Contexts in which transformers says less."""

import contextlib
import logging
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Keeps transformers from drawing progress bars, which would cut through other lines."""
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
    """Keeps transformers silent: what it would warn of, such as a missing tensor, is found and said by us."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with without_bars():
            yield
    finally:
        transformers_logging.set_verbosity(before)
