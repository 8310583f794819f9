"""Samples whose text may lose its middle, so that a prompt fits a length that is too short for the whole text.

As the authors of LongBench v2 do, the text keeps its first and its last tokens, equally many of both.
"""

import dataclasses
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.ruler.drafts import Draft
from sbeval.tasks.tokens import TokenCounter


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutDraft(Draft):
    """A sample with a text whose middle may be removed; it is shortened or extended in units of one token.

    Attributes:
        starts: first character of each token, int64 [tokens].
        stops: the character after each token, int64 [tokens].
    """

    text: str
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    counter: TokenCounter

    @classmethod
    def of_text(cls, text: str, counter: TokenCounter, *, whole: bool = False, **fields: object) -> Self:
        """Returns a sample with this text.

        Args:
            text: the text.
            counter: a counter with a fast tokenizer.
            whole: whether the sample is not defined without its whole text.
            fields: the other fields of the sample.

        Raises:
            UserError: the tokenizer gives no character offsets.
        """
        if not counter.tokenizer.is_fast:
            raise UserError("Cutting a text needs a tokenizer that gives character offsets: use a fast tokenizer.")
        _, starts, stops = counter.encode_with_offsets(text)
        inside = stops > starts
        units = int(inside.sum())
        bounds = {"least_units": units if whole else 0, "most_units": units}
        return cls(text=text, starts=starts[inside], stops=stops[inside], counter=counter, **bounds, **fields)  # type: ignore[arg-type]

    @classmethod
    def of_draft(cls, draft: Draft, counter: TokenCounter) -> Self:
        """Returns a sample of any task with its smallest body as the text to cut."""
        fields: dict[str, object] = {"references": draft.references, "answer_prefix": draft.answer_prefix}
        fields |= {"opening": draft.opening, "closing": draft.closing}
        return cls.of_text(draft.body(draft.least_units), counter, **fields)  # type: ignore[arg-type]

    def body(self, units: int) -> str:
        """Returns the text without its middle: the first half and the last half of `units` tokens."""
        if units >= len(self.starts):
            return self.text
        first, last = (units + 1) // 2, len(self.starts) - units // 2
        begin = self.text[: self.stops[first - 1]] if first else ""
        return begin + (self.text[self.starts[last] :] if last < len(self.starts) else "")

    def body_tokens(self, units: int) -> int:
        """Counts the tokens of the shortened text."""
        before, after = self.body_ends()
        around, whole = self.counter.encode([before + after, before + self.body(units) + after], special_tokens=False)
        return len(whole) - len(around)

    def units_within(self, tokens: int) -> int:
        """Returns how many tokens of the text can be kept so that the shortened text has at most `tokens` tokens.

        The text's beginning and end are joined and tokenised together, since tokens may change where they meet.
        """
        units = min(max(0, tokens), len(self.starts))
        while units > 0 and (over := self.body_tokens(units) - tokens) > 0:
            units = max(0, units - over)
        return units

    def cut_tokens(self, units: int) -> int:
        """Returns how many tokens of the text are removed."""
        return len(self.starts) - units
