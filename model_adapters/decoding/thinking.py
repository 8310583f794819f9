"""Thinking before an answer: how many tokens it may take, where it ends, and how a model is made to answer after it."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from sbeval.errors import UserError
from sbeval.model_adapters.decoding.texts import StopSequences

_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>", "</thought>")
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
    def of(cls, hf: Any, tokens: int) -> Self:
        """Returns the thinking of a loaded Hugging Face model of lm-eval, which is told to think, and where that ends.

        Raises:
            UserError: nothing says what ends it, or the tokens are too few for that end.
        """
        tokenizer = hf.tokenizer
        hf.chat_template_args = {**hf.chat_template_args, "enable_thinking": True}
        hf.think_end_token = named = hf.think_end_token or _think_end(tokenizer)
        end = tokenizer.decode([named]) if isinstance(named, int) else str(named)
        special = (n for n, token in tokenizer.added_tokens_decoder.items() if token.special and token.content == end)
        hf.think_end_token = next(special, named)  # by its number, since texts of answers leave special tokens out
        closing = _behind(tokenizer, f"\n{end}{_BETWEEN}")
        if tokens <= (least := len(closing) + _JOINED_TOKENS):
            expected = f"Expected thinking_tokens above {least}, what its end {end} takes"
            raise UserError(f"{expected}, found {tokens}: raise it, or leave it out and pass enable_thinking=false.")
        ends = hf.model.generation_config.eos_token_id
        ends = {hf.eot_token_id, *([ends] if isinstance(ends, int) else ends or ())}
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


def _think_end(tokenizer: Any) -> str:
    """Returns the text that ends the thinking of a model, as its chat template or its tokenizer has it.

    Raises:
        UserError: it is none of those that models use.
    """
    vocabulary, templates = tokenizer.get_vocab(), str(tokenizer.chat_template)
    for end in _ENDS:
        if end in vocabulary or end in templates:
            return end
    raise UserError(
        f"Expected the end of the model's thinking beside thinking_tokens, found none of {', '.join(_ENDS)} in its "
        "chat template and its tokenizer: name it with think_end_token=... in --model_args."
    )
