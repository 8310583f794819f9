"""What a window begins with: the token that is fed before its first target, the same rule at every length."""

from dataclasses import dataclass
from typing import Any

from sbeval.corpora import TokenizedCorpus, adds_bos, prefix_token_id
from sbeval.corpora.windows import Window
from sbeval.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadIn:
    """A rule for the token before a window.

    Attributes:
        policy: "text" feeds the token that stands before the window, "window" feeds BOS, "hf" feeds lm-eval's prefix
            token (BOS, else EOS) before a document and the token before anywhere else.
        token: what is fed where the text before the window is not: at the start of the text ("text"), always
            ("window"), before a document ("hf").
    """

    policy: str
    token: int

    @classmethod
    def settle(cls, task: str, tokenizer: Any, *, asked: str | None, separator: tuple[int, ...]) -> "LeadIn":
        """Returns the rule asked for, else "window" where the tokenizer adds BOS by itself, and "text" elsewhere.

        Raises:
            UserError: BOS was asked for, and the tokenizer has none.
        """
        policy = asked or ("window" if adds_bos(tokenizer) else "text")
        if policy == "text":
            return cls(policy=policy, token=separator[-1] if separator else prefix_token_id(tokenizer))
        if tokenizer.bos_token_id is None:
            raise UserError(f'{task}: expected a tokenizer with a BOS token for bos "window", found none: use "text".')
        return cls(policy=policy, token=int(tokenizer.bos_token_id))

    @classmethod
    def of_lm_eval(cls, tokenizer: Any) -> "LeadIn":
        """Returns the rule of lm-eval's rolling log-likelihood."""
        return cls(policy="hf", token=prefix_token_id(tokenizer))

    def before(self, window: Window, corpus: TokenizedCorpus) -> int:
        """Returns the token fed before a window's first target."""
        begins = self.policy == "window" or window.start == 0
        if self.policy == "hf" and not begins:
            begins = window.start == int(corpus.starts[corpus.document_at(window.start)])
        return self.token if begins else int(corpus.tokens(window.start - 1, window.start)[0])

    @property
    def is_text(self) -> bool:
        """Whether the token before a window is fed, so that it counts as context."""
        return self.policy != "window"
