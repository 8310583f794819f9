"""From requests to answers: each answer is counted and cached as it comes, and all are returned in order."""

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args
from tqdm import tqdm

from sbeval.model_adapters.session import Session
from sbeval.scoring.non_finite import NonFiniteError

Instances = Sequence[Instance]
Key = TypeVar("Key", bound=Hashable)
Request = TypeVar("Request", bound=tuple[Any, ...])
Response = TypeVar("Response")
Result = TypeVar("Result")
Other = TypeVar("Other")


class Stop(BaseException):
    """Thrown into a generator of results: it yields what is computed, begins nothing more, and raises this again."""


def handed_over(results: Iterable[Result]) -> Generator[Result, None, None]:
    """Yields results that are there already, all of them even if it is told to stop."""
    stop = None
    for result in results:
        try:
            yield result
        except Stop as told:
            stop = told
    if stop is not None:
        raise stop


def mapped(
    results: Generator[Result, None, None], convert: Callable[[Result], Iterable[Other]]
) -> Generator[Other, None, None]:
    """Yields everything that `convert` returns for each result, and passes a `Stop` on to the generator of results."""
    stop: Stop | None = None
    try:
        while True:
            try:
                result = next(results) if stop is None else results.throw(stop)
            except StopIteration:
                return
            stop = None
            for other in convert(result):
                try:
                    yield other
                except Stop as told:
                    stop = told
    finally:
        results.close()


def request_name(instance: Instance) -> str:
    """Returns a request's name: lm-eval's task, number of the document, number of the request in the document."""
    return f"request {instance.idx} of document {instance.doc_id} of {instance.task_name}"


def check_scores(requests: Sequence[Instance], scores: Sequence[float]) -> None:
    """Checks log-likelihoods that `hf` has computed.

    Raises:
        NonFiniteError: one is not finite; the message names the request.
    """
    for request, score in zip(requests, scores, strict=True):
        if not math.isfinite(score):
            raise NonFiniteError(f"Expected a finite log-likelihood, found {score}").of(request_name(request))


class Answers(Generic[Key, Response]):
    """The answers to requests of one type, given in any order while a progress bar is shown.

    Args:
        kind: the request type, as the response cache and the bar name it.
        arguments: those of each request, by the key under which its answer is given.
    """

    def __init__(self, session: Session, kind: str, arguments: Mapping[Key, Any], *, quiet: bool) -> None:
        self.given: dict[Key, Response] = {}
        self._hook = session.cache_hook
        self._request_type = kind
        self._arguments = arguments
        self._error: BaseException | None = None
        self._results: Generator[Any, None, None] | None = None
        self._counts_tokens = False
        # longest requests come first: a mean over the last ones would follow every change of length
        self._bar = tqdm(
            total=len(arguments), disable=quiet or session.quiet, desc=f"Running {kind} requests", smoothing=0.0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._results is not None:
            self._results.close()  # a traceback may keep it, and with it what it holds of the model

    def each(self, results: Generator[Result, None, None]) -> Iterator[Result]:
        """Yields results for which answers are given.

        Raises:
            BaseException: the first that `give` or `fail` met, once all results that are computed have been yielded.
        """
        self._results, stopped = results, False
        while True:
            try:
                if self._error is None or stopped:
                    result = next(results)
                else:
                    stopped = True
                    result = results.throw(Stop())
            except (StopIteration, Stop):
                break
            yield result
        if self._error is not None:
            raise self._error

    def count_tokens(self, total: int) -> None:
        """Lets the bar count `total` model inputs, of which `read` tells, in place of answers.

        Requests are run longest first, so a bar that counts requests expects all others to take as long.
        """
        self._counts_tokens = True
        self._bar.unit, self._bar.unit_scale = "token", True
        self._bar.reset(total)

    def read(self, tokens: int) -> None:
        """Advances a bar that counts tokens."""
        self._bar.update(tokens)

    def give(self, key: Key, answer: Response) -> None:
        """Keeps an answer."""
        self.given[key] = answer
        try:
            self._hook.add_partial(self._request_type, self._arguments[key], answer)
        except BaseException as error:  # an interrupt too: `each` raises it
            self.fail(error)
        if not self._counts_tokens:
            self._bar.update(1)

    def fail(self, error: BaseException) -> None:
        """Ends the run with an error, after other answers that are computed already."""
        self._error = self._error or error

    def in_order(self) -> list[Response]:
        """Returns every answer, in the order of the arguments."""
        return [self.given[key] for key in self._arguments]


class AnswersOnce(Answers[Request, Response]):
    """The answers to requests of this project's types, which lm-eval itself never looks up in its response cache.

    Equal requests are answered once.

    Attributes:
        todo: the requests that the cache does not hold.
        names: the name of the first of equal requests, for each that was asked.
    """

    def __init__(
        self, session: Session, requests: Instances, request_type: str, named: Callable[..., Request], *, quiet: bool
    ) -> None:
        database = session.cache_hook.dbdict or {}
        self._asked = [named(*request.args) for request in requests]
        self.names = {named(*request.args): request_name(request) for request in reversed(requests)}
        answers = {request: database.get(hash_args(request_type, tuple(request))) for request in self._asked}
        kept = {request: answer for request, answer in answers.items() if answer is not None}
        self.todo = [request for request in answers if request not in kept]
        super().__init__(session, request_type, {request: request for request in self.todo}, quiet=quiet)
        self.given |= kept

    def in_order(self) -> list[Response]:
        """Returns every answer, in the order of the requests."""
        return [self.given[request] for request in self._asked]
