"""Turns generated tokens into answers: finds the first stop sequence in a text, and returns the text up to it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.model_adapters.open.opened import Opened
from sbeval.scoring.non_finite import NoText

_MORE_TOKENS = 2  # a model may write a stop sequence in this many tokens more than the tokenizer encodes it with


class StopSequences:
    """The stop sequences of a request. An answer ends at the same token as in lm-eval's `hf`."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.texts = texts
        self._tokenizer = tokenizer
        self._looks = [(text, len(tokenizer.encode(text, add_special_tokens=False)) + _MORE_TOKENS) for text in texts]

    def end(self, tokens: Sequence[int], looked: int) -> int | None:
        """Returns the number of tokens up to and including the first stop sequence, None if there is none.

        No stop sequence ends within the first `looked` tokens, which an earlier call has searched.
        """
        if not self._looks or looked >= len(tokens):
            return None
        farthest = max(back for _, back in self._looks)
        recent = self._tokenizer.decode(tokens[max(0, looked + 1 - farthest) :])
        near = [(text, back) for text, back in self._looks if text in recent]
        for end in range(looked + 1, len(tokens) + 1 if near else 0):
            if any(text in self._tokenizer.decode(tokens[max(0, end - back) : end]) for text, back in near):
                return end
        return None


@dataclasses.dataclass(kw_only=True, slots=True)
class Text:
    """A prompt to continue, with the tokens of its answer so far.

    Attributes:
        key: identifies the text; the answer is yielded with it.
        fewest_new_tokens: end tokens (`Terms.not_early`) are not chosen before the answer has this many tokens.
        answer: the tokens that were generated so far.
    """

    key: int
    prompt: NDArray[np.int64]
    budget_tokens: int
    stops: StopSequences
    fewest_new_tokens: int = 0
    answer: list[int] = dataclasses.field(default_factory=list)
    done: bool = False

    @property
    def so_far(self) -> NDArray[np.int64]:
        """The tokens of the prompt and of the answer so far."""
        return np.concatenate([self.prompt, np.array(self.answer, dtype=np.int64)])

    @property
    def length_tokens(self) -> int:
        """The largest number of tokens of the prompt with its answer."""
        return len(self.prompt) + self.budget_tokens


class Continuation(NamedTuple):
    """The tokens generated for a prompt, up to and including the first end token or stop sequence.

    `sound` is whether all logits were finite. If not, the tokens end before the first logits that were NaN or infinite.
    """

    tokens: list[int]
    sound: bool = True


def up_to_end(tokens: list[int], ends: int | Sequence[int] | None) -> list[int]:
    """Returns generated tokens up to the first end token; the tokens after it are padding."""
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: first + 1]


def answer_text(tokenizer: Any, tokens: list[int], stop: Sequence[str], think_end_token: str | int | None) -> str:
    """Returns the text of a continuation up to its first stop sequence, without the model's thinking.

    `think_end_token` is the text or token id that ends the thinking, None if the model does not think.
    """
    thinks = isinstance(think_end_token, int)
    if thinks and think_end_token in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(think_end_token) :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    think_text = None if thinks else think_end_token
    answer: str = postprocess_generated_text(text.lstrip() if thinks else text, stop=stop, think_end_token=think_text)
    return answer


def stop_texts(tokenizer: Any, until: Sequence[Any]) -> list[str]:
    """Returns a request's stop sequences and the text of the end token; null in `until` means no stop sequence.

    Raises:
        UserError: an entry of `until` is neither text nor null.
    """
    texts = [text for text in until if text is not None]
    for text in texts:
        if not isinstance(text, str):
            remedy = "put it in quotes in --gen_kwargs or the task"
            raise UserError(f"Expected until to be text, a list of texts or null, found {text!r} in it: {remedy}.")
    end = tokenizer.eos_token_id
    eos = None if end is None else tokenizer.decode(end, skip_special_tokens=False)
    stops: list[str] = handle_stop_sequences(texts, eos=eos)
    return stops


def has_end(opened: Opened, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether a continuation ends with an end token or contains a stop sequence."""
    return tokens[-1] in opened.end_token_ids or any(text in opened.tokenizer.decode(tokens) for text in stop if text)


def no_text(prompt_tokens: int, answer_tokens: int) -> NoText:
    """Returns the `NoText` for an answer whose logits become NaN or infinite after `answer_tokens` tokens."""
    length = prompt_tokens + answer_tokens
    return NoText(
        f"Expected finite logits, found NaN or infinity for token {answer_tokens + 1} of the answer, after position "
        f"{length - 1} of an input of {length} tokens"
    )
