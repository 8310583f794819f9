"""Logits that leave no token a probability: noticed on the device, named, and recorded as null where the user asks.

A position's logits are such where they hold NaN or infinity, or minus infinity alone. Minus infinity for some tokens is
a probability of zero: models mask parts of their vocabulary with it.

With `non_finite=null`, metrics of lm-eval's own tasks are NaN where an answer is missing. NaN among the scores of
choices makes the first of them the most probable, and an empty text is a wrong answer. So a task's metrics are computed
as always, then replaced by NaN for documents with a missing answer, and so are the means over them. Tasks of this
project do this themselves, length by length.

Shape suffixes: B rows, N scored positions, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from sbeval.errors import UserError

REMEDY = (
    "try dtype=float32 and check the checkpoint's weights, or pass non_finite=null in --model_args to record null for "
    "such answers"
)
_SUMMED = {**dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32), torch.float64: torch.float64}
NEVER = 2**62
"""Stands for no step at all among numbers of tokens."""


class NonFiniteError(UserError):
    """A model gave NaN or infinity where a number is needed, in this row of a batch."""

    def __init__(self, found: str, row: int = 0, request: str = "") -> None:
        super().__init__(f"{found}{request and f' in {request}'}: {REMEDY}.")
        self.found, self.row = found, row

    def of(self, request: str) -> Self:
        """Returns the same error with the request's name in it."""
        return type(self)(self.found, self.row, request)


def non_finite_weights(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that hold NaN or infinity.

    Attention may turn an infinite key into finite logits, so that no answer shows it. One sum a parameter is taken,
    which is not finite where a value is not; weights on no device and of whole numbers are not looked at.
    """
    found = []
    for name, weight in model.named_parameters():
        if weight.is_meta or weight.dtype not in _SUMMED:
            continue
        if not weight.sum(dtype=_SUMMED[weight.dtype]).isfinite() and not weight.isfinite().all():
            found.append(name)
    return found


def check_finite(logprobs_N: Tensor, row_N: Tensor, position_N: Tensor) -> None:
    """Checks float32 log-probabilities on the CPU: rows of a batch, and positions whose outputs predict the tokens.

    Raises:
        NonFiniteError: one is not finite; it names the first.
    """
    finite = np.isfinite(logprobs_N.numpy())
    if finite.all():
        return
    wrong = np.flatnonzero(~finite)
    first = int(wrong[0])
    length = int(position_N[row_N == row_N[first]].max()) + 1
    raise NonFiniteError(
        f"Expected finite log-probabilities, found {float(logprobs_N[first])} for the token after position "
        f"{int(position_N[first])} of an input of {length} tokens ({len(wrong)} of {len(logprobs_N)} scored tokens)",
        int(row_N[first]),
    )


class NoText(str):
    """Stands for the text of an answer whose logits are no numbers; read as text it is empty. `error` says where."""

    error: NonFiniteError
    facts: Mapping[str, Any]

    def __new__(cls, found: str, row: int = 0) -> Self:
        """Keeps the sentence."""
        self = super().__new__(cls, "")
        self.error = NonFiniteError(found, row)
        self.facts = {}
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.error.found, self.error.row), {"facts": self.facts})


class FiniteWatch(LogitsProcessor):
    """Notices each row's first step with logits that are no numbers; nothing waits for the device before
    `first_tokens`.

    As a logits processor it hands logits on, with zeros in place of those from which nothing can be drawn. A decoding
    loop of another kind calls `note` once a step, which a CUDA graph can hold.

    Args:
        rows: number of rows, beams counted.

    Attributes:
        first_B: int64, how many tokens stood before each row's first such step, or `NEVER`.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.first_B = torch.full((rows,), NEVER, dtype=torch.int64, device=device)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments with which transformers generates under this watch.

        A checkpoint's generation config may ask for numbers in the place of invalid ones, before anyone looks.
        """
        return {"logits_processor": LogitsProcessorList([self]), "remove_invalid_values": False}

    def note(self, logits_BV: Tensor, tokens: Tensor | int, of_B: Tensor | None = None) -> Tensor:
        """Looks at the logits of one step, of all rows or those marked: bool [B], whether they are no numbers.

        `tokens` are how many every row holds before this step, padding included; a number or int64 [] or [B].
        """
        none_B = logits_BV.amax(-1).isfinite().logical_not_()
        if of_B is not None:
            none_B &= of_B
        self.first_B.copy_(torch.where(none_B, self.first_B.clamp(max=tokens), self.first_B))
        return none_B

    def begin(self, rows_N: Tensor) -> None:
        """Forgets these rows, in which other texts begin."""
        self.first_B[rows_N] = NEVER

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Looks at scores [B, V] before the token after `input_ids` is chosen."""
        if len(scores) != len(self.first_B):  # beams, or several answers to a prompt
            self.first_B = self.first_B.repeat_interleave(len(scores) // len(self.first_B))
        none_B = self.note(scores, input_ids.shape[1])
        return scores.masked_fill(none_B[:, None], 0.0)

    def first_tokens(self, prompts: int) -> list[int | None]:
        """Returns, for each prompt, how many tokens stood before the first step whose logits are no numbers."""
        first = self.first_B.view(prompts, -1).amin(1).tolist()
        return [None if tokens == NEVER else tokens for tokens in first]


class Null(float):
    """NaN that stands for a metric of a document without an answer."""


class _NullAnswers(list[Any]):
    """Several answers to one request, one of which is missing."""


def record_nulls(task_class: type[Any]) -> None:
    """Makes lm-eval's tasks record NaN for documents without an answer; a second call does nothing."""
    original = task_class.apply_filters
    if hasattr(original, "records_nulls"):
        return

    @functools.wraps(original)
    def apply_filters(task: Any) -> Any:
        found = original(task)
        if _mark_answers(task) and not getattr(task, "reads_null", False):
            task.process_results = _null_for_null(task.process_results)
        if not getattr(task, "reads_null", False):
            task.aggregation = functools.partial(_null_among_null, task.aggregation)
        return found

    apply_filters.records_nulls = True  # type: ignore[attr-defined]
    task_class.apply_filters = apply_filters


def is_null(answer: Any) -> bool:
    """Returns whether an answer, or the score of one, is missing."""
    if isinstance(answer, tuple) and answer:
        return is_null(answer[0])
    return isinstance(answer, NoText | _NullAnswers) or (isinstance(answer, float) and math.isnan(answer))


def _mark_answers(task: Any) -> bool:
    """Marks filtered answers whose request has none, since filters make plain texts; returns whether there are any."""
    marked = [instance for instance in task.instances if any(map(is_null, instance.resps))]
    for instance in marked:
        for name, filtered in instance.filtered_resps.items():
            if isinstance(filtered, str):
                instance.filtered_resps[name] = next(filter(is_null, instance.resps))
            elif isinstance(filtered, list):
                instance.filtered_resps[name] = _NullAnswers(filtered)
    return bool(marked)


def _null_for_null(process: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    @functools.wraps(process)
    def process_results(document: Any, results: Sequence[Any]) -> Mapping[str, Any]:
        if not any(map(is_null, results)):
            return process(document, results)
        return dict.fromkeys(process(document, [_stand_in(answer) for answer in results]), Null(math.nan))

    return process_results


def _stand_in(answer: Any) -> Any:
    """Returns an answer of the same kind that metrics can be computed from."""
    if isinstance(answer, tuple) and is_null(answer):
        return (0.0, *answer[1:])
    return 0.0 if isinstance(answer, float) and is_null(answer) else answer


def _null_among_null(aggregation: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _NullAware(function) for name, function in aggregation().items()}


class _NullAware:
    """An aggregation that is NaN where a document's metric is missing.

    It equals the function it calls until it has met such a metric: lm-eval looks the standard error up by function.
    """

    def __init__(self, function: Callable[[Sequence[Any]], Any]) -> None:
        self._function = function
        self._met_null = False
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, items: Sequence[Any]) -> Any:
        self._met_null = any(isinstance(item, Null) for item in items)
        return math.nan if self._met_null else self._function(items)

    def __eq__(self, other: object) -> bool:
        return not self._met_null and self._function == other

    def __hash__(self) -> int:
        return hash(self._function)
