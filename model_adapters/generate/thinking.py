"""Thinking before an answer: how many tokens it may take, where it ends, and how a model is made to answer after it."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from sbeval.errors import UserError
from sbeval.model_adapters.generate.texts import StopSequences
from sbeval.model_adapters.open.opened import Opened

_BETWEEN = "\n\n"
_JOINED_TOKENS = 2
"""Room for what texts take more in tokens of their own than in those of the whole."""


class Thought(NamedTuple):
    """What a model thought before an answer: `cut` at its budget, or `stopped` where the text ended without its end."""

    text: str
    tokens: int
    cut: bool
    stopped: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """The thinking of a model's answers.

    Attributes:
        tokens: most tokens of it, its end included.
        end: the text that ends it.
        closing: tokens that end it where the model has not done so.
        end_tokens: tokens that end any text.
    """

    tokens: int
    end: str
    closing: list[int]
    end_tokens: Collection[int]
    tokenizer: Any

    @classmethod
    def of(cls, opened: Opened, tokens: int) -> Self:
        """Returns the thinking of a loaded model.

        Args:
            opened: a model whose `think_end_token` is known.
            tokens: most tokens of the thinking.

        Raises:
            UserError: the tokens are too few for the end of the thinking.
        """
        tokenizer, end = opened.tokenizer, _text_of(opened.tokenizer, opened.think_end_token)
        closing = _behind(tokenizer, f"\n{end}{_BETWEEN}")
        if tokens <= (least := len(closing) + _JOINED_TOKENS):
            expected = f"Expected thinking_tokens above {least}, what its end {end} takes"
            raise UserError(f"{expected}, found {tokens}: raise it, or leave it out and pass enable_thinking=false.")
        ends = {tokenizer.eos_token_id, *opened.end_token_ids}
        return cls(tokens=tokens, end=end, closing=closing, end_tokens=ends, tokenizer=tokenizer)

    def setting(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the setting under which the thinking of a request is generated."""
        budget = self.tokens - len(self.closing) - _JOINED_TOKENS
        kept = {name: value for name, value in setting.items() if name != "min_new_tokens"}
        return {**kept, "until": [self.end], "max_gen_toks": budget}

    def room(self, beginning: str) -> int:
        """Returns the most tokens between a prompt and what the model itself writes of the answer."""
        return self.tokens - _JOINED_TOKENS + len(_behind(self.tokenizer, beginning))

    def ended(self, written: list[int], beginning: str, until: Sequence[Any] = ()) -> tuple[Thought, list[int]]:
        """Returns what the model has thought, and all tokens before what it writes of the answer.

        That begins with given words. An end that the model wrote is followed by what it writes itself, but for empty
        lines before a beginning, and where a sequence of `until` would end the answer in them.
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
    """Returns a text's tokens behind others, where SentencePiece puts no space before it."""
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    for anchor in ("\n", "x") if text else ():
        before, tokens = encode(anchor), encode(anchor + text)
        if tokens[: len(before)] == before:
            return list(tokens[len(before) :])
    return list(encode(text)) if text else []


def _text_of(tokenizer: Any, end: str | int | None) -> str:
    """Returns the text that ends the thinking."""
    if not isinstance(end, int):
        return str(end)
    special = tokenizer.added_tokens_decoder.get(end)
    return str(special.content if special is not None else tokenizer.decode([end]))
