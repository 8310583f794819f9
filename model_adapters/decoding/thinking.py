"""Thinking before an answer: how many tokens it may take, where it ends, and how a model is made to answer after it."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from sbeval.errors import UserError
from sbeval.model_adapters.decoding.texts import StopSequences

_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>", "</thought>")
_BETWEEN = "\n\n"
_JOINED_TOKENS = 2
"""Room for what texts take more in tokens of their own than in those of the whole."""


class Thought(NamedTuple):
    """What a model thought before an answer, and whether it had to be made to answer."""

    text: str
    tokens: int
    cut: bool


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
        closing = tokenizer.encode(f"\n{end}{_BETWEEN}", add_special_tokens=False)
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
        return self.tokens - _JOINED_TOKENS + len(self._tokens_of(beginning))

    def ended(self, written: list[int], beginning: str) -> tuple[Thought, list[int]]:
        """Returns what the model has thought, and all tokens before its answer, which begins with given words."""
        if (length := StopSequences(self.tokenizer, [self.end]).end(written, 0)) is not None:
            cut, closing = False, self._tokens_of(_BETWEEN)
        else:
            length = next((place for place, token in enumerate(written) if token in self.end_tokens), len(written))
            cut, closing = True, self.closing
        thought = Thought(self.tokenizer.decode(written[:length]), length, cut)
        return thought, [*written[:length], *closing, *self._tokens_of(beginning)]

    def _tokens_of(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


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
