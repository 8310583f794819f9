"""Logits that leave no token a probability: noticed on the device, named, and recorded as null where the user asks.

A position's logits are such where they hold NaN or infinity, or minus infinity alone. Minus infinity for some tokens is
a probability of zero: models mask parts of their vocabulary with it.

Shape suffixes: B rows, N scored positions, V vocabulary.
"""

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
_SUMMED = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32),
    torch.float64: torch.float64,
}
NEVER = 2**62
"""Stands for no step at all among numbers of tokens."""


class NonFiniteError(UserError):
    """A model gave NaN or infinity where a number is needed.

    Args:
        found: the sentence up to what asked for them.
        row: which input of a batch.
    """

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
    """Checks scores of chosen tokens, on the CPU.

    Args:
        logprobs_N: float32 [N].
        row_N: int64 [N], the row of a batch.
        position_N: int64 [N], the input position whose output predicts the token.

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
    """Stands for the text of an answer whose logits are no numbers; read as text it is empty.

    Attributes:
        error: says where they are not.
    """

    error: NonFiniteError

    def __new__(cls, found: str, row: int = 0) -> Self:
        """Keeps the sentence."""
        self = super().__new__(cls, "")
        self.error = NonFiniteError(found, row)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.error.found, self.error.row))


class FiniteWatch(LogitsProcessor):
    """Notices each row's first step with logits that are no numbers; nothing waits for the device before
    `first_tokens`.

    As a logits processor it hands logits on, with zeros in place of those from which nothing can be drawn. A decoding
    loop of another kind calls `note` once a step, which a CUDA graph can hold.

    Args:
        rows: number of rows, beams counted.
        device: where the logits are.

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
        """Looks at the logits of one step.

        Args:
            logits_BV: floating-point [B, V].
            tokens: how many tokens every row holds before this step, padding included; a number or int64 [] or [B].
            of_B: bool, the rows that are looked at; None for all.

        Returns:
            bool [B], whether a row's logits are no numbers.
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
