"""How many requests and tokens a list of tasks is, made as a run makes them, and how long some documents take here."""

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
"""Tokens of each task that are run at least: some full batches."""
_LEAST_DOCUMENTS = 2
_FEWSHOT_SEED = 1234  # lm-eval's own
_ANSWER_TOKENS = 256  # of `max_gen_toks`, where a task does not say


class Piece(NamedTuple):
    """What the model is given for one request, or for several at once: lm-eval's name of it, and tokens."""

    request_type: str
    tokens: int
    new_tokens: int = 0


ShareWindows = Callable[[Sequence[TokenLogprobsRequest]], Iterable[TokenLogprobsRequest]]
"""From windows to those the model reads: the others' scores are read off them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskWork:
    """What one task asks of a model: lm-eval's documents and requests, and pieces with how often they are given.

    Contexts that several requests share count every time, though the model reads some of them once.
    """

    task: str
    documents: int
    requests: int
    pieces: Mapping[Piece, int]

    @property
    def tokens(self) -> int:
        """Model inputs of the whole task."""
        return sum(piece.tokens * count for piece, count in self.pieces.items())

    @property
    def new_tokens(self) -> int:
        """Tokens generated at most."""
        return sum(piece.new_tokens * count for piece, count in self.pieces.items())

    def to_json(self) -> dict[str, Any]:
        """Returns it JSON-ready."""
        counts = {"documents": self.documents, "requests": self.requests, "tokens": self.tokens}
        pieces = [{**piece._asdict(), "count": count} for piece, count in sorted(self.pieces.items())]
        return {"task": self.task, **counts, "new_tokens_at_most": self.new_tokens, "pieces": pieces}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """An estimate from a throughput of some `source`: seconds in the model, to load it, and to find all this out."""

    source: str
    model_seconds: Mapping[str, float]
    loading_seconds: float
    measuring_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds in the model, over all tasks."""
        return sum(self.model_seconds.values())


def make_tasks(
    names: Sequence[str], metadata: Mapping[str, Any], *, folders: Sequence[str], limit: float | None, packaged: bool
) -> dict[str, Any]:
    """Returns lm-eval's tasks by name, their requests made.

    `metadata` holds options of tasks, the model's arguments among them; `folders` hold task files beside the packaged
    ones; `limit` is documents of each task, or a share of them. `packaged` says that every name is a packaged one, so
    that lm-eval's thousands stay unread.

    Raises:
        UserError: what a task finds wrong with its options or its text.
    """
    # they take a second to import
    from lm_eval.evaluator_utils import get_sample_size
    from lm_eval.tasks import TaskManager

    places = [*folders, str(registered.tasks_folder())]
    manager = TaskManager(include_path=places, include_defaults=not packaged, metadata=dict(metadata))
    try:
        tasks: dict[str, Any] = manager.load(list(names))["tasks"]
    except (KeyError, ValueError, RuntimeError) as error:  # the last of a home that is nobody's
        if raised_here(error):
            raise
        raise UserError(
            f"Expected tasks that lm-eval can load, found: {first_line(error)}; correct --tasks."
        ) from error
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        task.build_all_requests(limit=get_sample_size(task, limit), rank=0, world_size=1)
    return tasks


Encode = Callable[[Sequence[str]], list[int]]
"""From texts to the number of tokens of each."""


def encode_with(source: str) -> Encode:
    """Returns what counts tokens with the tokenizer of a folder or hub id, loaded when the first text comes."""
    loaded = functools.cache(lambda: load_tokenizer(source))
    return lambda texts: [len(tokens) for tokens in encode_together(loaded(), list(texts), quiet=True)]


def count_work(name: str, instances: Sequence[Any], encode: Encode, share: ShareWindows) -> TaskWork:
    """Counts what some of lm-eval's requests of one task ask of the model.

    Raises:
        UserError: requests of a type whose tokens nobody can count.
    """
    pieces: Counter[Piece] = Counter()
    for kind, of_kind in _by_type(instances).items():
        pieces.update(_pieces(kind, [instance.args for instance in of_kind], encode, share))
    documents = {instance.doc_id for instance in instances}
    return TaskWork(task=name, documents=len(documents), requests=len(instances), pieces=dict(pieces))


def _by_type(instances: Sequence[Any]) -> dict[str, list[Any]]:
    types: dict[str, list[Any]] = {}
    for instance in instances:
        types.setdefault(instance.request_type, []).append(instance)
    return types


def _pieces(kind: str, arguments: Sequence[Any], encode: Encode, share: ShareWindows) -> Iterable[Piece]:
    if kind == TOKEN_LOGPROBS:
        windows = dict.fromkeys(TokenLogprobsRequest(*window) for window in arguments)
        return [Piece(kind, window.context_length) for window in share(list(windows))]
    if kind in (TARGET_LOGPROBS, ATTENTION_SPAN):  # (key, inputs), (key, context length, queries)
        return [Piece(kind, length) for _, length, *_ in dict.fromkeys(map(tuple, arguments))]
    if kind == "generate_until":
        budgets = [int(options.get("max_gen_toks") or _ANSWER_TOKENS) for _, options in arguments]
        lengths = encode([prompt for prompt, _ in arguments])
        return [Piece(kind, *pair) for pair in zip(lengths, budgets, strict=True)]
    if kind in ("loglikelihood", "loglikelihood_rolling"):
        return [Piece(kind, length) for length in encode(["".join(texts[:2]) for texts in arguments])]
    raise UserError.expected("requests whose tokens can be counted", found=kind, remedy="leave its task out")


def measure(
    tasks: Mapping[str, Any], arguments: Mapping[str, Any], device: str, encode: Encode, share: ShareWindows
) -> Duration:
    """Estimates how long tasks take by running some documents of each with the model `sb`.

    The shortest requests are run before, since the first ones of a process compile kernels; a run pays that once too.
    """
    from lm_eval.api.registry import get_model  # takes a second to import

    started = time.perf_counter()
    others = {"batch_size": "auto", "max_batch_size": None, "device": device}
    lm = get_model("sb").create_from_arg_obj(dict(arguments), others)
    loading = time.perf_counter() - started
    model_seconds = {}
    ran = 0
    started = time.perf_counter()
    for name, task in tasks.items():
        count = functools.partial(count_work, name, encode=encode, share=share)
        chosen = _sample(task.instances, SAMPLE_TOKENS[device], count)
        whole = count(task.instances)
        sample = count(chosen)
        kinds = _by_type(chosen).values()
        shortest = [min(of_kind, key=lambda instance: count([instance]).tokens) for of_kind in kinds]
        first = _seconds(lm, shortest)
        spent = _seconds(lm, chosen)
        ran += sample.documents
        model_seconds[name] = first + spent * whole.tokens / max(1, sample.tokens)
    return Duration(
        source=f"a measurement on this machine's {device}, of {ran} documents",
        model_seconds=model_seconds,
        loading_seconds=loading,
        measuring_seconds=time.perf_counter() - started,
    )


def _sample(instances: Sequence[Any], least_tokens: int, count: Callable[[Sequence[Any]], TaskWork]) -> list[Any]:
    """Returns all requests of some documents, which lie evenly among all."""
    documents = list(dict.fromkeys(instance.doc_id for instance in instances))
    of_first = [instance for instance in instances if instance.doc_id == documents[0]]
    tokens = max(1, count(of_first).tokens)
    wanted = min(len(documents), max(_LEAST_DOCUMENTS, -(-least_tokens // tokens)))
    kept = {documents[number * len(documents) // wanted] for number in range(wanted)}
    return [instance for instance in instances if instance.doc_id in kept]


def _seconds(lm: Any, instances: Sequence[Any]) -> float:
    """Returns how long a model takes for some requests."""
    started = time.perf_counter()
    for kind, of_kind in _by_type(instances).items():
        getattr(lm, kind)(of_kind)
    return time.perf_counter() - started
