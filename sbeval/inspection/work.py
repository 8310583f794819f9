"""Counts the requests and tokens of tasks, as a run builds them, and estimates their time from some documents."""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sbeval import registered
from sbeval.corpora.tokenizers import encode_together, load_tokenizer
from sbeval.errors import UserError, first_line, raised_here
from sbeval.scoring.requests import ATTENTION_SPAN, TARGET_LOGPROBS, TOKEN_LOGPROBS, TokenLogprobsRequest

SAMPLE_TOKENS = {"cpu": 2 * 8192, "cuda": 4 * 65536}
"""Smallest number of tokens of each task that `measure` runs: a few full batches."""
_LEAST_DOCUMENTS = 2
_FEWSHOT_SEED = 1234  # as lm-eval
_ANSWER_TOKENS = 256  # for tasks without `max_gen_toks`


class Piece(NamedTuple):
    """One forward pass or generation, which may serve several requests: type, input tokens, most new tokens."""

    request_type: str
    tokens: int
    new_tokens: int = 0


ShareWindows = Callable[[Sequence[TokenLogprobsRequest]], Iterable[TokenLogprobsRequest]]
"""A function that returns the windows which the model runs; the scores of all other windows are taken from them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskWork:
    """The work of one task.

    Attributes:
        task: name of the task.
        documents: number of lm-eval documents.
        requests: number of lm-eval requests.
        pieces: number of occurrences of each piece. A context that several requests share is counted each time,
            although the model may read it only once.
        available_documents: number of lm-eval documents that the task has without a limit; None if it is unknown.
    """

    task: str
    documents: int
    requests: int
    pieces: Mapping[Piece, int]
    available_documents: int | None = None

    @property
    def tokens(self) -> int:
        """Number of model inputs of the whole task."""
        return sum(piece.tokens * count for piece, count in self.pieces.items())

    @property
    def new_tokens(self) -> int:
        """Largest number of tokens that the task may generate."""
        return sum(piece.new_tokens * count for piece, count in self.pieces.items())

    def to_json(self) -> dict[str, Any]:
        """Returns the counts for JSON."""
        counts = {"documents": self.documents, "requests": self.requests, "tokens": self.tokens}
        pieces = [{**piece._asdict(), "count": count} for piece, count in sorted(self.pieces.items())]
        return {"task": self.task, **counts, "new_tokens_at_most": self.new_tokens, "pieces": pieces}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """An estimate of the time that tasks take.

    Attributes:
        source: what the estimate is based on.
        model_seconds: time in the model for each task.
        loading_seconds: time to load the model.
        measuring_seconds: time that the measurement took.
    """

    source: str
    model_seconds: Mapping[str, float]
    loading_seconds: float
    measuring_seconds: float

    @property
    def seconds(self) -> float:
        """Time in the model for all tasks."""
        return sum(self.model_seconds.values())


def make_tasks(
    names: Sequence[str], metadata: Mapping[str, Any], *, folders: Sequence[str], limit: float | None, packaged: bool
) -> dict[str, Any]:
    """Loads tasks as lm-eval does, and builds their requests.

    Args:
        names: names of tasks.
        metadata: options of the tasks, with the model's arguments.
        folders: folders with task files beside the packaged ones.
        limit: number of documents of each task, or a fraction of them.
        packaged: whether all names are packaged tasks, so that lm-eval's thousands of YAML files need not be read.

    Returns:
        lm-eval's task objects by name, with their requests.

    Raises:
        UserError: lm-eval cannot load a task, or a task refuses its options or its text.
    """
    # lm-eval takes a second to import
    from lm_eval.evaluator_utils import get_sample_size
    from lm_eval.tasks import TaskManager

    places = [*folders, str(registered.tasks_folder())]
    manager = TaskManager(include_path=places, include_defaults=not packaged, metadata=dict(metadata))
    try:
        tasks: dict[str, Any] = manager.load(list(names))["tasks"]
    except (KeyError, ValueError, RuntimeError) as error:  # RuntimeError: `~user` without a home folder
        if raised_here(error):
            raise
        raise UserError(f"lm-eval cannot load --tasks: {first_line(error)}; correct the names.") from error
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        task.build_all_requests(limit=get_sample_size(task, limit), rank=0, world_size=1)
    return tasks


Encode = Callable[[Sequence[str]], list[int]]
"""A function from texts to the number of tokens in each."""


def encode_with(source: str) -> Encode:
    """Returns a function that counts tokens with a folder's or hub id's tokenizer, loaded at the first call."""
    loaded = functools.cache(lambda: load_tokenizer(source))
    return lambda texts: [len(tokens) for tokens in encode_together(loaded(), list(texts), quiet=True)]


def count_work(name: str, instances: Sequence[Any], encode: Encode, share: ShareWindows) -> TaskWork:
    """Counts documents, requests and tokens of one task's lm-eval requests.

    Raises:
        UserError: a request's type is unknown, so that its tokens cannot be counted.
    """
    pieces: Counter[Piece] = Counter()
    for request_type, requests in _by_type(instances).items():
        pieces.update(_pieces(request_type, [request.args for request in requests], encode, share))
    documents = {instance.doc_id for instance in instances}
    return TaskWork(task=name, documents=len(documents), requests=len(instances), pieces=dict(pieces))


def _by_type(instances: Sequence[Any]) -> dict[str, list[Any]]:
    """Groups requests by their request type."""
    types: dict[str, list[Any]] = {}
    for instance in instances:
        types.setdefault(instance.request_type, []).append(instance)
    return types


def _pieces(request_type: str, arguments: Sequence[Any], encode: Encode, share: ShareWindows) -> Iterable[Piece]:
    """Returns the pieces of work of requests of one type; `arguments` are the requests' arguments."""
    if request_type == TOKEN_LOGPROBS:
        windows = dict.fromkeys(TokenLogprobsRequest(*window) for window in arguments)
        return [Piece(request_type, window.context_length) for window in share(list(windows))]
    if request_type in (TARGET_LOGPROBS, ATTENTION_SPAN):  # arguments: (key, inputs), or (key, context length, queries)
        return [Piece(request_type, length) for _, length, *_ in dict.fromkeys(map(tuple, arguments))]
    if request_type == "generate_until":
        budgets = [int(options.get("max_gen_toks") or _ANSWER_TOKENS) for _, options in arguments]
        lengths = encode([prompt for prompt, _ in arguments])
        return [Piece(request_type, *pair) for pair in zip(lengths, budgets, strict=True)]
    if request_type in ("loglikelihood", "loglikelihood_rolling"):
        return [Piece(request_type, length) for length in encode(["".join(texts[:2]) for texts in arguments])]
    raise UserError(f"The tokens of {request_type} requests cannot be counted: remove the task from --tasks.")


def measure(
    tasks: Mapping[str, Any], arguments: Mapping[str, Any], device: str, encode: Encode, share: ShareWindows
) -> Duration:
    """Estimates how long tasks take by running some documents of each with the model `sb`.

    The shortest requests run first as a warm-up, since a process compiles kernels at its first requests. The time of
    the warm-up is part of the estimate, because a run needs it too.

    Args:
        tasks: lm-eval's tasks with their requests.
        arguments: arguments of the model.
        device: "cuda" or "cpu".
        encode: counts tokens of texts.
        share: the model adapter's `share_windows`.
    """
    from lm_eval.api.registry import get_model  # takes a second to import

    started = time.perf_counter()
    settings = {"batch_size": "auto", "max_batch_size": None, "device": device}
    lm = get_model("sb").create_from_arg_obj(dict(arguments), settings)
    loading_seconds = time.perf_counter() - started
    model_seconds = {}
    documents = 0
    started = time.perf_counter()
    for name, task in tasks.items():
        count = functools.partial(count_work, name, encode=encode, share=share)
        sample = _sample(task.instances, SAMPLE_TOKENS[device], count)
        task_work, sample_work = count(task.instances), count(sample)
        by_type = _by_type(sample).values()
        shortest = [min(requests, key=lambda request: count([request]).tokens) for requests in by_type]
        warmup_seconds = _seconds(lm, shortest)
        sample_seconds = _seconds(lm, sample)
        documents += sample_work.documents
        model_seconds[name] = warmup_seconds + sample_seconds * task_work.tokens / max(1, sample_work.tokens)
    return Duration(
        source=f"{documents} documents measured on this machine's {device}",
        model_seconds=model_seconds,
        loading_seconds=loading_seconds,
        measuring_seconds=time.perf_counter() - started,
    )


def _sample(instances: Sequence[Any], least_tokens: int, count: Callable[[Sequence[Any]], TaskWork]) -> list[Any]:
    """Returns all requests of evenly spaced documents with about `least_tokens` tokens, at least `_LEAST_DOCUMENTS`."""
    documents = list(dict.fromkeys(instance.doc_id for instance in instances))
    first_requests = [instance for instance in instances if instance.doc_id == documents[0]]
    tokens = max(1, count(first_requests).tokens)
    sample_size = min(len(documents), max(_LEAST_DOCUMENTS, -(-least_tokens // tokens)))
    sample = {documents[number * len(documents) // sample_size] for number in range(sample_size)}
    return [instance for instance in instances if instance.doc_id in sample]


def _seconds(lm: Any, instances: Sequence[Any]) -> float:
    """Returns the time that a model takes for some requests."""
    started = time.perf_counter()
    for request_type, requests in _by_type(instances).items():
        getattr(lm, request_type)(requests)
    return time.perf_counter() - started
