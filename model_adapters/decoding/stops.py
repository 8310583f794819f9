"""Where stop sequences end an answer, searched token by token as in lm-eval's `hf`."""

from collections.abc import Sequence
from typing import Any

_MORE_TOKENS = 2  # a stop sequence may be generated in more tokens than it is encoded in


class StopSequences:
    """Stop sequences of one tokenizer.

    Args:
        tokenizer: encodes them, and decodes what is generated.
        texts: the stop sequences.

    Attributes:
        texts: the same.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.texts = texts
        self._tokenizer = tokenizer
        self._looks = [(text, len(tokenizer.encode(text, add_special_tokens=False)) + _MORE_TOKENS) for text in texts]

    def end(self, tokens: Sequence[int], looked: int) -> int | None:
        """Returns the number of tokens up to the one that completes the first stop sequence, None without one.

        Args:
            tokens: what was generated.
            looked: how many of them were searched before.
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
