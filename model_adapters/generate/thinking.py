"""A model's thinking before its answer: its budget, its end marker, and how the model is made to answer after it."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from sbeval.errors import UserError
from sbeval.model_adapters.generate.texts import StopSequences
from sbeval.model_adapters.open.opened import Opened

_BETWEEN = "\n\n"
_JOINED_TOKENS = 2
"""Spare tokens: texts that are tokenized separately may take this many more tokens than when tokenized together."""


class Thought(NamedTuple):
    """The thinking before an answer.

    Attributes:
        cut: whether it used up its budget.
        stopped: whether the model ended the whole text without the end marker of the thinking.
    """

    text: str
    tokens: int
    cut: bool
    stopped: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """How a model thinks before its answers.

    Attributes:
        tokens: most tokens of the thinking, its end marker included.
        end: the text that ends the thinking.
        closing: tokens that are appended if the model has not ended its thinking itself.
        end_tokens: tokens that end any text.
    """

    tokens: int
    end: str
    closing: list[int]
    end_tokens: Collection[int]
    tokenizer: Any

    @classmethod
    def of(cls, opened: Opened, tokens: int) -> Self:
        """Returns the thinking settings for a loaded model.

        Args:
            opened: a model whose `think_end_token` is known.
            tokens: most tokens of the thinking.

        Raises:
            UserError: `tokens` leaves no room for any thinking beside its end marker.
        """
        tokenizer, end = opened.tokenizer, _text_of(opened.tokenizer, opened.think_end_token)
        closing = _behind(tokenizer, f"\n{end}{_BETWEEN}")
        if tokens <= (least := len(closing) + _JOINED_TOKENS):
            expected = f"Expected thinking_tokens above {least}, the number of tokens that its end marker {end} takes"
            raise UserError(f"{expected}, found {tokens}: raise it, or leave it out and pass enable_thinking=false.")
        ends = {tokenizer.eos_token_id, *opened.end_token_ids}
        return cls(tokens=tokens, end=end, closing=closing, end_tokens=ends, tokenizer=tokenizer)

    def setting(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the generation settings for a request's thinking."""
        budget = self.tokens - len(self.closing) - _JOINED_TOKENS
        unchanged = {name: value for name, value in setting.items() if name != "min_new_tokens"}
        return {**unchanged, "until": [self.end], "max_gen_toks": budget}

    def room(self, beginning: str) -> int:
        """Returns the most tokens between the prompt and the first token of the answer that the model itself writes."""
        return self.tokens - _JOINED_TOKENS + len(_behind(self.tokenizer, beginning))

    def ended(self, written: list[int], beginning: str, until: Sequence[Any] = ()) -> tuple[Thought, list[int]]:
        """Returns the thinking, and all tokens between the prompt and the answer that the model then writes.

        These tokens end with `beginning`, the prescribed beginning of the answer. After an end marker of its own, the
        model also writes the blank line itself. The blank line is added here only before a `beginning`, or if a stop
        sequence of `until` would end the answer in it.
        """
        if (length := StopSequences(self.tokenizer, [self.end]).end(written, 0)) is not None:
            ended, stopped, closing = True, False, list[int]()
            begun = beginning or any(stop in _BETWEEN for stop in until if stop and isinstance(stop, str))
            after = self.tokenizer.decode(written[:length]).rpartition(self.end)[2]
            beginning = (_BETWEEN[after.count("\n") :] if begun else "") + beginning
        else:
            length = next((place for place, token in enumerate(written) if token in self.end_tokens), len(written))
            ended, stopped, closing = False, length < len(written), self.closing
        thought = Thought(self.tokenizer.decode(written[:length]), length, not (ended or stopped), stopped)
        return thought, [*written[:length], *closing, *_behind(self.tokenizer, beginning)]


def _behind(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a text that follows other text: SentencePiece then puts no space before it."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    for anchor in ("\n", "x") if text else ():
        before, tokens = encode(anchor), encode(anchor + text)
        if tokens[: len(before)] == before:
            return list(tokens[len(before) :])
    return list(encode(text)) if text else []


def _text_of(tokenizer: Any, end: str | int | None) -> str:
    """Returns the end marker of the thinking as text."""
    if not isinstance(end, int):
        return str(end)
    special = tokenizer.added_tokens_decoder.get(end)
    return str(special.content if special is not None else tokenizer.decode([end]))
