"""Limits chat templates: they are code from a checkpoint, so their memory and the length of their text are limited."""

import contextlib
import functools
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, first_line

_MOST_BYTES, _MEMORY_BYTES = 2**25, 2**30
_limiting = threading.RLock()  # the memory limit applies to the whole process


def limited(write: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of `hf` that renders a chat template: limits its memory and the length of its text.

    Raises:
        UserError: there is no template, the template fails, or it exceeds a limit.
    """

    @functools.wraps(write)
    def written(lm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _little_memory():
                text = write(lm, *args, **kwargs)
                if text is not None and len(str.encode(text)) > _MOST_BYTES:
                    raise ValueError(f"it writes more than {_MOST_BYTES} bytes")
        except Exception as error:  # a template may raise anything
            template = lm.tokenizer.chat_template
            fault = "none" if template is None else f"one that fails ({first_line(error)})"
            several = ", name one of its templates," if isinstance(template, dict) else ","
            raise UserError(
                f"Expected a chat template beside the tokenizer, found {fault}: leave out --apply_chat_template, as "
                f"for any model that was not trained on chats{several} or correct the template."
            ) from error
        return text

    return written


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Inside this context, the process may allocate little further memory; only one thread can enter at a time."""
    with _limiting:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]) + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (soft if 0 <= soft < most else most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
