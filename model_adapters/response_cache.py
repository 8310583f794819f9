"""lm-eval's response cache, for the request type of our own that lm-eval itself does not look up."""

from collections.abc import Iterable
from typing import Any

from lm_eval.api.model import CacheHook, hash_args


def cached_response(hook: CacheHook, request_type: str, arguments: Iterable[Any]) -> Any:
    """Returns the finished response of a request, None where there is none or no cache is in use."""
    if hook.dbdict is None:
        return None
    return hook.dbdict.get(hash_args(request_type, arguments))
