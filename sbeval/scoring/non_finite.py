"""NaN and infinite logits: detects them on the device, raises an error, or records null with `non_finite=null`.

A position's logits are invalid if they contain NaN or plus infinity, or if all are minus infinity. Minus infinity for
some tokens is a probability of zero: models mask parts of their vocabulary with it.

With `non_finite=null`, an answer computed from invalid logits ("invalid answer") must make metrics of lm-eval's own
tasks NaN. Left to lm-eval, NaN among the scores of multiple choices would make the first choice the most probable, and
an empty text would count as a wrong answer. So a task's metrics are computed as usual, then replaced by NaN for
documents with an invalid answer, and so are the means over documents. Tasks of this project do this themselves,
separately for each length.

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
"""Value of `FiniteWatch.first_B` for a row whose logits have always been valid."""


class NonFiniteError(UserError):
    """The model computed NaN or infinity. `fault` is the message without the remedy; `row` is the batch row."""

    def __init__(self, fault: str, row: int = 0, request: str = "") -> None:
        super().__init__(f"{fault}{request and f' in {request}'}: {REMEDY}.")
        self.fault, self.row = fault, row

    def of(self, request: str) -> Self:
        """Returns the same error, whose message also names the request."""
        return type(self)(self.fault, self.row, request)


def non_finite_weights(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that hold NaN or infinity.

    The weights must be searched, because attention may turn an infinite key into finite logits, so that no answer shows
    the fault. Each parameter is summed first, since the sum is not finite if a value is not. Meta tensors and integers
    are skipped.
    """
    names = []
    for name, weight in model.named_parameters():
        if weight.is_meta or weight.dtype not in _SUMMED:
            continue
        if not weight.sum(dtype=_SUMMED[weight.dtype]).isfinite() and not weight.isfinite().all():
            names.append(name)
    return names


def check_finite(logprobs_N: Tensor, row_N: Tensor, position_N: Tensor) -> None:
    """Checks that log-probabilities, float32 [N] on the CPU, are finite.

    `row_N` and `position_N` are each target's row in the batch and the position whose output predicts it.

    Raises:
        NonFiniteError: a log-probability is not finite. The message names the first.
    """
    finite = np.isfinite(logprobs_N.numpy())
    if finite.all():
        return
    non_finite = np.flatnonzero(~finite)
    first = int(non_finite[0])
    length = int(position_N[row_N == row_N[first]].max()) + 1
    raise NonFiniteError(
        f"Expected finite log-probabilities, found {float(logprobs_N[first])} for the token after position "
        f"{int(position_N[first])} of an input of {length} tokens "
        f"({len(non_finite)} of {len(logprobs_N)} scored tokens)",
        int(row_N[first]),
    )


class NoText(str):
    """The empty text in place of an answer whose logits were NaN or infinite; `error` says at which token."""

    error: NonFiniteError
    facts: Mapping[str, Any]

    def __new__(cls, fault: str, row: int = 0) -> Self:
        """Makes the empty text; `fault` and `row` are the arguments of its `NonFiniteError`."""
        self = super().__new__(cls, "")
        self.error = NonFiniteError(fault, row)
        self.facts = {}
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.error.fault, self.error.row), {"facts": self.facts})


class FiniteWatch(LogitsProcessor):
    """Records, on the device, each row's first decode step with invalid logits; only `first_tokens` waits for the GPU.

    As a logits processor it returns the logits, with zeros in rows whose logits are invalid, so that sampling does not
    fail. Other decoding loops call `note` once a step, which a CUDA graph can capture.

    Args:
        rows: number of rows, including beams.
        device: device of the logits.

    Attributes:
        first_B: int64 [B], the number of tokens before each row's first invalid step, or `NEVER`.
    """

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self.first_B = torch.full((rows,), NEVER, dtype=torch.int64, device=device)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for transformers' `generate` that install this logits processor.

        `remove_invalid_values` is switched off: a checkpoint's generation config may set it, and it would replace
        invalid logits before this processor sees them.
        """
        return {"logits_processor": LogitsProcessorList([self]), "remove_invalid_values": False}

    def note(self, logits_BV: Tensor, tokens: Tensor | int, of_B: Tensor | None = None) -> Tensor:
        """Records one step; returns bool [B], whether each row's logits are invalid.

        Args:
            logits_BV: logits of this step.
            tokens: tokens of every row before this step, including padding; a number or int64 [] or [B].
            of_B: bool [B], the rows to check; None checks all.
        """
        invalid_B = logits_BV.amax(-1).isfinite().logical_not_()
        if of_B is not None:
            invalid_B &= of_B
        self.first_B.copy_(torch.where(invalid_B, self.first_B.clamp(max=tokens), self.first_B))
        return invalid_B

    def begin(self, rows_N: Tensor) -> None:
        """Resets these rows of the batch, because a new text begins in each."""
        self.first_B[rows_N] = NEVER

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Records the step that chooses the token after `input_ids`; `scores` [B, V] are its logits."""
        if len(scores) != len(self.first_B):  # beams, or several answers to a prompt
            self.first_B = self.first_B.repeat_interleave(len(scores) // len(self.first_B))
        invalid_B = self.note(scores, input_ids.shape[1])
        return scores.masked_fill(invalid_B[:, None], 0.0)

    def first_tokens(self, prompts: int) -> list[int | None]:
        """Returns for each prompt the number of tokens before its first step with invalid logits, or None."""
        first = self.first_B.view(prompts, -1).amin(1).tolist()
        return [None if tokens == NEVER else tokens for tokens in first]


class Null(float):
    """The NaN that replaces a metric of a document with an invalid answer; a plain NaN comes from the metric itself."""


class _NullAnswers(list[Any]):
    """Several answers to one request, at least one of which is invalid."""


def record_nulls(task_class: type[Any]) -> None:
    """Monkey-patches lm-eval's task class to record NaN for documents with an invalid answer; idempotent."""
    original = task_class.apply_filters
    if hasattr(original, "records_nulls"):
        return

    @functools.wraps(original)
    def apply_filters(task: Any) -> Any:
        filtered = original(task)
        if _mark_answers(task) and not getattr(task, "reads_null", False):
            task.process_results = _with_null_metrics(task.process_results)
        if not getattr(task, "reads_null", False):
            task.aggregation = functools.partial(_null_aware_aggregation, task.aggregation)
        return filtered

    apply_filters.records_nulls = True  # type: ignore[attr-defined]
    task_class.apply_filters = apply_filters


def is_null(answer: Any) -> bool:
    """Whether an answer is invalid: a `NoText`, or a score that is NaN."""
    if isinstance(answer, tuple) and answer:
        return is_null(answer[0])
    return isinstance(answer, NoText | _NullAnswers) or (isinstance(answer, float) and math.isnan(answer))


def _mark_answers(task: Any) -> bool:
    """Marks invalid answers again after lm-eval's filters have lost the marks; returns whether the task has any."""
    marked = [instance for instance in task.instances if any(map(is_null, instance.resps))]
    for instance in marked:
        for name, filtered in instance.filtered_resps.items():
            if isinstance(filtered, str):
                instance.filtered_resps[name] = next(filter(is_null, instance.resps))
            elif isinstance(filtered, list):
                instance.filtered_resps[name] = _NullAnswers(filtered)
    return bool(marked)


def _with_null_metrics(process: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    @functools.wraps(process)
    def process_results(document: Any, results: Sequence[Any]) -> Mapping[str, Any]:
        if not any(map(is_null, results)):
            return process(document, results)
        # metrics of the replaced answers are computed only to learn the names of the metrics
        return dict.fromkeys(process(document, [_stand_in(answer) for answer in results]), Null(math.nan))

    return process_results


def _stand_in(answer: Any) -> Any:
    """Returns a valid answer of the same type in place of an invalid one, so that metrics can be computed."""
    if isinstance(answer, tuple) and is_null(answer):
        return (0.0, *answer[1:])
    return 0.0 if isinstance(answer, float) and is_null(answer) else answer


def _null_aware_aggregation(aggregation: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _NullAware(function) for name, function in aggregation().items()}


class _NullAware:
    """An aggregation function that returns NaN if a document's metric is `Null`.

    It compares equal to the wrapped function until it has met such a metric, because lm-eval looks up the function's
    standard error in a dictionary.
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
