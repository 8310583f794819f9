"""A reasoning model's thinking before its answer: token budget, end marker, and tokens that end a thought too long."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from sbeval.errors import UserError
from sbeval.model_adapters.generate.texts import StopSequences
from sbeval.model_adapters.open.opened import Opened

_BETWEEN = "\n\n"
_JOINED_TOKENS = 2
"""Spare tokens in budgets: two texts that are tokenized separately may take this many tokens more than together."""


class Thought(NamedTuple):
    """Facts about the thinking before an answer.

    Attributes:
        cut: whether the thinking used up its token budget.
        stopped: whether the model generated an end token before the end marker of the thinking.
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
        end: the text of the end marker, such as "</think>".
        closing: tokens that are appended if the model has not ended its thinking itself.
        end_tokens: the model's end tokens, such as EOS.
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
            UserError: `tokens` is so small that only the end marker would fit.
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
        """Returns the largest number of tokens that thinking and `beginning` (of the answer) add to a prompt."""
        return self.tokens - _JOINED_TOKENS + len(_behind(self.tokenizer, beginning))

    def ended(self, written: list[int], beginning: str, until: Sequence[Any] = ()) -> tuple[Thought, list[int]]:
        """Returns facts about the thinking, and the tokens to append to the prompt before the answer is generated.

        The tokens are the thinking `written` by the model, its end marker, and `beginning`: text with which the task
        makes every answer begin. If the model wrote the end marker, it would write the blank line after it, too. So the
        blank line is added only before a `beginning`, or if a stop sequence of `until` would match in it.
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
    """Returns the tokens of a text that follows other text, without the space that SentencePiece puts at a start."""
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
