"""How many requests and tokens a list of tasks is: the tasks are made as a run makes them, and asked for requests."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sbeval import plugin
from sbeval.corpora.tokenizers import encode_together, load_tokenizer
from sbeval.errors import UserError
from sbeval.scoring.requests import ATTENTION_SPAN, TARGET_LOGPROBS, TOKEN_LOGPROBS, TokenLogprobsRequest

_FEWSHOT_SEED = 1234  # lm-eval's own
_ANSWER_TOKENS = 256  # of `max_gen_toks`, where a task does not say


class Piece(NamedTuple):
    """What the model is given for one request, or for several at once.

    Attributes:
        request_type: lm-eval's name of it.
        tokens: model inputs.
        new_tokens: most tokens to be generated.
    """

    request_type: str
    tokens: int
    new_tokens: int = 0


ShareWindows = Callable[[Sequence[TokenLogprobsRequest]], Iterable[TokenLogprobsRequest]]
"""From windows to those the model reads: the others' scores are read off them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskWork:
    """What one task asks of a model.

    Attributes:
        task: its name.
        documents: lm-eval's documents, or samples.
        requests: of them all.
        pieces: what the model is given, with how often. Contexts that several requests share count every time, though
            the model reads some of them once.
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


def make_tasks(
    names: Sequence[str], metadata: Mapping[str, Any], *, folders: Sequence[str], limit: float | None, packaged: bool
) -> dict[str, Any]:
    """Returns lm-eval's tasks by name, their requests made.

    Args:
        names: of tasks and groups.
        metadata: options of tasks, the model's arguments among them.
        folders: of task files, beside the packaged ones.
        limit: documents of each task, or a share of them; None for all.
        packaged: whether every name is a packaged one, so that lm-eval's thousands stay unread.

    Raises:
        UserError: what a task finds wrong with its options or its text.
    """
    plugin.install()
    from lm_eval.evaluator_utils import get_sample_size
    from lm_eval.tasks import TaskManager

    places = [*folders, str(plugin.tasks_folder())]
    manager = TaskManager(include_path=places, include_defaults=not packaged, metadata=dict(metadata))
    tasks: dict[str, Any] = manager.load(list(names))["tasks"]
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        task.build_all_requests(limit=get_sample_size(task, limit), rank=0, world_size=1)
    return tasks


def count_work(name: str, instances: Sequence[Any], encode: "Encode", share: ShareWindows) -> TaskWork:
    """Counts what some requests of one task ask of the model.

    Args:
        name: of the task.
        instances: lm-eval's requests.
        encode: from texts to numbers of tokens.
        share: see `ShareWindows`.
    """
    pieces: Counter[Piece] = Counter()
    kinds = dict.fromkeys(instance.request_type for instance in instances)
    for kind in kinds:
        arguments = [instance.args for instance in instances if instance.request_type == kind]
        pieces.update(_pieces(kind, arguments, encode, share))
    return TaskWork(
        task=name,
        documents=len({instance.doc_id for instance in instances}),
        requests=len(instances),
        pieces=dict(pieces),
    )


def _pieces(kind: str, arguments: Sequence[Any], encode: "Encode", share: ShareWindows) -> Iterable[Piece]:
    if kind == TOKEN_LOGPROBS:
        windows = dict.fromkeys(TokenLogprobsRequest(*one) for one in arguments)
        return [Piece(kind, window.context_length) for window in share(list(windows))]
    if kind in (TARGET_LOGPROBS, ATTENTION_SPAN):  # (key, inputs), (key, context length, queries)
        return [Piece(kind, one[1]) for one in dict.fromkeys(map(tuple, arguments))]
    if kind == "generate_until":
        budgets = [int(options.get("max_gen_toks") or _ANSWER_TOKENS) for _, options in arguments]
        lengths = encode([prompt for prompt, _ in arguments])
        return [Piece(kind, *pair) for pair in zip(lengths, budgets, strict=True)]
    if kind in ("loglikelihood", "loglikelihood_rolling"):
        return [Piece(kind, length) for length in encode(["".join(one[:2]) for one in arguments])]
    raise UserError(f"Expected requests whose tokens can be counted, found {kind}: leave its task out.")


class Encode:
    """Counts the tokens of texts, with a tokenizer that is loaded when the first text comes.

    Args:
        source: a folder or a hub id.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokenizer: Any = None

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each text."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._source)
        return [len(tokens) for tokens in encode_together(self._tokenizer, list(texts), quiet=True)]
