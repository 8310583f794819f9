"""Collects answers: counts and caches each answer when it is computed, and returns all in the order of the requests."""

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import hash_args
from tqdm import tqdm

from sbeval.model_adapters.session import Session
from sbeval.processes.progress import shown_bar
from sbeval.scoring.non_finite import NonFiniteError

Instances = Sequence[Instance]
Key = TypeVar("Key", bound=Hashable)
Request = TypeVar("Request", bound=tuple[Any, ...])
Response = TypeVar("Response")
Result = TypeVar("Result")
Converted = TypeVar("Converted")


class Stop(BaseException):
    """An exception that `Answers` throws into a generator of results to end it early.

    The generator then starts no new work, yields the results that are computed, and raises this exception again.
    """


def handed_over(results: Iterable[Result]) -> Generator[Result, None, None]:
    """Yields all of `results`, which are computed already. If the caller throws `Stop`, it is raised after the last."""
    stop = None
    for result in results:
        try:
            yield result
        except Stop as thrown:
            stop = thrown
    if stop is not None:
        raise stop


def mapped(
    results: Generator[Result, None, None], convert: Callable[[Result], Iterable[Converted]]
) -> Generator[Converted, None, None]:
    """Yields all values that `convert` returns for each result.

    If the caller throws a `Stop` into this generator, it is thrown into the generator `results`.
    """
    stop: Stop | None = None
    try:
        while True:
            try:
                result = next(results) if stop is None else results.throw(stop)
            except StopIteration:
                return
            stop = None
            for converted in convert(result):
                try:
                    yield converted
                except Stop as thrown:
                    stop = thrown
    finally:
        results.close()


def request_name(instance: Instance) -> str:
    """Returns a request's name for errors: the task, the document's number and the request's number in the document."""
    return f"request {instance.idx} of document {instance.doc_id} of {instance.task_name}"


def check_scores(requests: Sequence[Instance], scores: Sequence[float]) -> None:
    """Checks log-likelihoods that `hf` has computed for an encoder-decoder model.

    Raises:
        NonFiniteError: a log-likelihood is not finite; the message names the request.
    """
    for request, score in zip(requests, scores, strict=True):
        if not math.isfinite(score):
            raise NonFiniteError(f"Expected a finite log-likelihood, found {score}").of(request_name(request))


class Answers(Generic[Key, Response]):
    """The answers to requests of one type, which may be computed in any order.

    A progress bar counts the answers, or the input tokens after `count_tokens`, and names its unit.

    Args:
        session: the session, whose response cache stores the answers.
        kind: the request type, as in the response cache and on the progress bar.
        arguments: the arguments of each request, by the key that `give` is called with.
        quiet: whether the progress bar is hidden.
    """

    def __init__(self, session: Session, kind: str, arguments: Mapping[Key, Any], *, quiet: bool) -> None:
        self.given: dict[Key, Response] = {}
        self._hook = session.cache_hook
        self._request_type = kind
        self._arguments = arguments
        self._error: BaseException | None = None
        self._results: Generator[Any, None, None] | None = None
        self._counts_tokens = False
        self._whole = None if quiet or session.quiet else shown_bar()
        self._total = len(arguments)
        # no smoothing: the longest requests run first, so the speed of recent requests would give a wrong estimate
        self._bar = tqdm(
            total=self._total,
            disable=quiet or session.quiet or self._whole is not None,
            desc=f"Running {kind} requests",
            unit=" answers",
            smoothing=0.0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._results is not None:
            self._results.close()  # otherwise a traceback could keep the generator and its tensors alive

    def each(self, results: Generator[Result, None, None]) -> Iterator[Result]:
        """Yields results; the caller passes the answers to `give` before it takes the next result.

        Raises:
            BaseException: the first error from `give` or `fail`, raised after all computed results were yielded.
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
        """Makes the progress bar count input tokens, `total` in all, instead of answers; `read` then advances it.

        The longest requests run first, so a bar that counts requests would overestimate the remaining time.
        """
        self._counts_tokens, self._total = True, total
        self._bar.unit, self._bar.unit_scale = "token", True
        self._bar.reset(total)

    def read(self, tokens: int) -> None:
        """Advances the progress bar by this number of input tokens; the bar must count tokens."""
        self._advance(tokens)

    def give(self, key: Key, answer: Response) -> None:
        """Stores an answer, and writes it to the response cache."""
        self.given[key] = answer
        try:
            self._hook.add_partial(self._request_type, self._arguments[key], answer)
        except BaseException as error:  # also an interrupt; `each` raises it after all computed results were yielded
            self.fail(error)
        if not self._counts_tokens:
            self._advance(1)

    def _advance(self, done: int) -> None:
        self._bar.update(done)
        if self._whole is not None:
            self._whole.advance(done / self._total)

    def fail(self, error: BaseException) -> None:
        """Makes `each` raise this error after it has yielded the results that are computed already."""
        self._error = self._error or error

    def in_order(self) -> list[Response]:
        """Returns every answer, in the order of `arguments`."""
        return [self.given[key] for key in self._arguments]


class AnswersOnce(Answers[Request, Response]):
    """The answers to requests of this project's own types, such as `TokenLogprobsRequest`.

    This class looks requests up in the response cache, since lm-eval does so only for its own types. Equal requests are
    answered once.

    Attributes:
        todo: the requests that the cache has no answer for.
        names: for each request, the name of the first lm-eval instance with this request, for error messages.
    """

    def __init__(
        self, session: Session, requests: Instances, request_type: str, named: Callable[..., Request], *, quiet: bool
    ) -> None:
        database = session.cache_hook.dbdict or {}
        self._requested = [named(*request.args) for request in requests]
        self.names = {named(*request.args): request_name(request) for request in reversed(requests)}
        answers = {request: database.get(hash_args(request_type, tuple(request))) for request in self._requested}
        cached = {request: answer for request, answer in answers.items() if answer is not None}
        self.todo = [request for request in answers if request not in cached]
        super().__init__(session, request_type, {request: request for request in self.todo}, quiet=quiet)
        self.given |= cached

    def in_order(self) -> list[Response]:
        """Returns every answer, in the order of the requests."""
        return [self.given[request] for request in self._requested]
