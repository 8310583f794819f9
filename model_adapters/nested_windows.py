"""Windows of one text that begin at the same token: the longest is run, and the shorter ones read their scores off it.

A causal model gives the first tokens of a window the same log-probabilities however far the window goes on, so a text
scored at several context lengths costs little more than the longest one. This does not hold where RoPE's frequencies
depend on the length; such windows are run one by one.
"""

from collections.abc import Iterable
from typing import NamedTuple

from sbeval.token_logprobs import TokenLogprobsRequest


class SharedWindow(NamedTuple):
    """One window to run, and whose scores lie in it.

    Attributes:
        run: the window; it scores every target that a member asks for.
        members: requests, each with the slice of the run's scores that is its own.
    """

    run: TokenLogprobsRequest
    members: list[tuple[TokenLogprobsRequest, slice]]


def share_windows(requests: Iterable[TokenLogprobsRequest], *, nested: bool) -> list[SharedWindow]:
    """Returns the windows to run, in the order of their first requests.

    Args:
        requests: what is asked for, each once.
        nested: whether a shorter window may be read off a longer one with the same lead-in and first target.
    """
    groups: dict[object, list[TokenLogprobsRequest]] = {}
    for request in requests:
        text, _, stop = request.key.rpartition(":")
        groups.setdefault((text, request.lead_in) if nested and stop else request, []).append(request)
    return [_shared(group) for group in groups.values()]


def _shared(group: list[TokenLogprobsRequest]) -> SharedWindow:
    longest = max(group, key=lambda request: request.context_length)
    first = min(request.context_length - request.scored for request in group)
    run = longest._replace(scored=longest.context_length - first)
    return SharedWindow(
        run,
        [
            (
                request,
                slice(request.context_length - request.scored - first, request.context_length - first),
            )
            for request in group
        ],
    )
