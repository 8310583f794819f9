"""From requests to answers: each answer is counted and cached as it comes, and all are returned in order."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args
from tqdm import tqdm

from sbeval.model_adapters.session import Session
from sbeval.scoring.non_finite import NonFiniteError

Key = TypeVar("Key", bound=Hashable)
Request = TypeVar("Request", bound=tuple[Any, ...])
Answer = TypeVar("Answer")
Give = Callable[[Request, Answer], None]


def request_name(instance: Instance) -> str:
    """Returns a request's name: lm-eval's task, number of the document, number of the request in the document."""
    return f"request {instance.idx} of document {instance.doc_id} of {instance.task_name}"


def names_by_arguments(requests: Sequence[Instance]) -> dict[tuple[Any, ...], str]:
    """Returns, for each tuple of arguments, the name of the first request that has it."""
    return {tuple(request.args): request_name(request) for request in reversed(requests)}


def check_scores(requests: Sequence[Instance], scores: Sequence[float]) -> None:
    """Checks log-likelihoods that `hf` has computed.

    Raises:
        NonFiniteError: one is not finite; the message names the request.
    """
    for request, score in zip(requests, scores, strict=True):
        if not math.isfinite(score):
            raise NonFiniteError(f"Expected a finite log-likelihood, found {score}").of(request_name(request))


class Answers(Generic[Key, Answer]):
    """The answers to requests of one type, given in any order while a progress bar is shown.

    Args:
        session: whose response cache keeps them.
        request_type: the name of the requests, in the response cache and beside the bar.
        arguments: those of each request, by the key under which its answer is given.
        steps: length of the bar if it counts parts of answers.
        quiet: whether to hide the bar.
    """

    def __init__(
        self,
        session: Session,
        request_type: str,
        arguments: Mapping[Key, Iterable[Any]],
        *,
        steps: int | None = None,
        quiet: bool,
    ) -> None:
        self.given: dict[Key, Answer] = {}
        self._hook = session.cache_hook
        self._request_type = request_type
        self._arguments = arguments
        self._bar = tqdm(
            total=len(arguments) if steps is None else steps,
            disable=quiet or session.quiet,
            desc=f"Running {request_type} requests",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self) -> None:
        """Advances the bar by a part of an answer."""
        self._bar.update(1)

    def give(self, key: Key, answer: Answer) -> None:
        """Keeps an answer."""
        self.given[key] = answer
        self._hook.add_partial(self._request_type, self._arguments[key], answer)
        self._bar.update(1)

    def in_order(self) -> list[Answer]:
        """Returns every answer, in the order of the arguments."""
        return [self.given[key] for key in self._arguments]


def answer_each_once(
    session: Session,
    requests: Sequence[Instance],
    request_type: str,
    named: Callable[..., Request],
    run: Callable[[list[Request], Give[Request, Answer]], None],
    *,
    quiet: bool,
) -> list[Answer]:
    """Answers requests of one of this project's types, which lm-eval itself never looks up in its response cache.

    Args:
        session: has the response cache to look in.
        requests: what is asked for; equal arguments are answered once.
        request_type: the name of the requests.
        named: makes a request from its arguments.
        run: answers every request that the cache does not hold.
        quiet: whether to hide the progress bar.
    """
    database = session.cache_hook.dbdict
    kept: dict[tuple[Any, ...], Answer] = {}
    todo: list[Request] = []
    for arguments in dict.fromkeys(tuple(request.args) for request in requests):
        answer = None if database is None else database.get(hash_args(request_type, arguments))
        if answer is None:
            todo.append(named(*arguments))
        else:
            kept[arguments] = answer
    asked: dict[tuple[Any, ...], Request] = {request: request for request in todo}
    answers: Answers[tuple[Any, ...], Answer] = Answers(session, request_type, asked, quiet=quiet)
    with answers:
        run(todo, answers.give)
    found = kept | answers.given
    return [found[tuple(request.args)] for request in requests]
