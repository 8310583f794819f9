"""Windows that begin at the same token of a text: only the longest is run, and its scores serve the shorter ones, too.

In a causal model, the scores of a window's first tokens do not depend on later tokens. If RoPE's frequencies depend on
the input's length, this does not hold, and each window is run.
"""

from collections.abc import Iterable
from typing import NamedTuple

from sbeval.scoring.requests import TokenLogprobsRequest


class SharedWindow(NamedTuple):
    """A window that answers several requests.

    `run` is the request for the longest window. `members` pairs each request with its slice of the window's scores.
    """

    run: TokenLogprobsRequest
    members: list[tuple[TokenLogprobsRequest, slice]]


def share_windows(requests: Iterable[TokenLogprobsRequest], *, nested: bool) -> list[SharedWindow]:
    """Returns the windows to run for `requests`, which must be distinct, in the order of the requests.

    If `nested`, requests for windows that begin at the same token of a text, after the same lead-in (the input before
    that token, such as BOS), share the longest of these windows. Otherwise every request has a window of its own.
    """
    groups: dict[object, list[TokenLogprobsRequest]] = {}
    for request in requests:
        text, _, stop = request.key.rpartition(":")
        groups.setdefault((text, request.lead_in) if nested and stop else request, []).append(request)
    return [_shared(group) for group in groups.values()]


def _shared(group: list[TokenLogprobsRequest]) -> SharedWindow:
    longest = max(group, key=lambda request: request.context_length)
    first = min(request.context_length - request.scored for request in group)
    stops = [request.context_length - first for request in group]
    members = [(request, slice(stop - request.scored, stop)) for request, stop in zip(group, stops, strict=True)]
    return SharedWindow(longest._replace(scored=longest.context_length - first), members)
