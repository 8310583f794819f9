"""Chat templates: code of a checkpoint, held to some memory and some length."""

import contextlib
import functools
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, first_line

_MOST_TEMPLATE_BYTES, _TEMPLATE_MEMORY_BYTES = 2**25, 2**30
_limiting = threading.RLock()  # the limit is the whole process's


def in_template(write: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `hf` that writes with a chat template, which may be any code.

    Raises:
        UserError: there is none, it fails, or it writes more than can be meant.
    """

    @functools.wraps(write)
    def written(lm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _little_memory():
                text = write(lm, *args, **kwargs)
                if text is not None and len(str.encode(text)) > _MOST_TEMPLATE_BYTES:
                    raise ValueError(f"it writes more than {_MOST_TEMPLATE_BYTES} bytes")
        except Exception as error:  # of any class, as code has them
            there = lm.tokenizer.chat_template
            what = "none" if there is None else f"one that fails ({first_line(error)})"
            several = ", name one that there is," if isinstance(there, dict) else ","
            raise UserError(
                f"Expected a chat template beside the tokenizer, found {what}: leave out --apply_chat_template, as "
                f"for any model that was not trained on chats{several} or mend the template."
            ) from error
        return text

    return written


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Holds this process, for one thread at a time, to some memory beyond what it has."""
    with _limiting:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]) + _TEMPLATE_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (soft if 0 <= soft < most else most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
