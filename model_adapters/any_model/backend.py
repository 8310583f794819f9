"""A model of lm-eval that scores tokens: how it is called, how long a window it takes whole, and what is kept of it."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from lm_eval.api.model import hash_args

from sbeval.errors import UserError, first_line
from sbeval.model_adapters.any_model.described import backend_name, identity, record
from sbeval.model_adapters.any_model.returned import whole_answers

Pairs = Mapping[str, tuple[list[int], list[int]]]
"""Context and continuation of pieces by name."""

_KIND = "loglikelihood"  # under which lm-eval keeps what `_loglikelihood_tokens` answers
# by how many tokens `max_length` has to exceed context and continuation, which lm-eval 0.4.13 else cuts on the left
_SPARE = {"HFLM": -1, "NEURON_HF": -1, "VLLM": 1, "TemplateAPI": 1}


class Score(NamedTuple):
    """The sum of a continuation's log-probabilities in nats, and whether each of its tokens is the most probable."""

    logprob: float
    greedy: bool


@dataclasses.dataclass(slots=True)
class Backend:
    """One loaded model.

    Attributes:
        name: lm-eval's, with the address of a server.
        tokens: how many it was sent in this run.
        seconds: how long it took to answer.
    """

    lm: Any
    name: str
    tokens: int = 0
    seconds: float = 0.0
    _identity: str | None = None

    @classmethod
    def of(cls, lm: Any) -> Self:
        """Returns a model's backend, the same each time, and has the model describe itself in the results file.

        Raises:
            UserError: it has an encoder.
        """
        if (known := getattr(lm, "_sbeval_backend", None)) is not None:
            return known  # type: ignore[no-any-return]
        backend = cls(lm, backend_name(lm))
        if getattr(lm, "backend", "causal") != "causal":
            raise UserError(f"Expected a causal language model for windows of tokens, found {lm.backend}: use another.")
        lm._sbeval_backend, described = backend, getattr(lm, "get_model_info", dict)
        lm.get_model_info = lambda: {**described(), "sbeval": record(lm, backend.name, backend.speed).to_json()}
        return backend

    @property
    def speed(self) -> float | None:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else None

    def _key(self, name: str) -> tuple[str, str]:
        if self._identity is None:
            self._identity = identity(self.lm, self.name)
        return (self._identity, name)

    def _standing(self, answered: int, pairs: Pairs, planned: int) -> str:
        if self.lm.cache_hook.dbdict is None:
            return "with --use_cache FILE, answers are kept as they come, and the same command goes on after them"
        answered += sum(self.kept(name) is not None for name in pairs)
        return f"{answered} of {planned} requests are kept by --use_cache, and the same command goes on after them"

    def kept(self, name: str) -> Score | None:
        """Returns what the response cache holds of a piece, None where it was not asked for with this model."""
        if (database := self.lm.cache_hook.dbdict) is None:
            return None
        answer = database.get(hash_args(_KIND, self._key(name)))
        return None if answer is None else Score(*answer)

    def check_room(self, tokens: int) -> None:
        """Refuses a window of which lm-eval would cut the beginning; `tokens` are context and continuation.

        Raises:
            UserError: naming the longest window that fits.
        """
        kinds = [kind.__name__ for kind in type(self.lm).__mro__]
        spare = next((_SPARE[kind] for kind in kinds if kind in _SPARE), 0)
        given = getattr(self.lm, "max_length", None)
        if given is None or tokens + spare <= (given := given + ("TemplateAPI" in kinds)):
            return
        raise UserError(
            f"Expected windows of at most {given - spare - 1} tokens, the longest that {self.name} takes whole with "
            f"max_length={given}, found one of {tokens - 1}: pass max_length={tokens + spare} in --model_args, or its "
            "own name for that, or ask for shorter context_lengths."
        )

    def score(self, pairs: Pairs, *, answered: int, planned: int, quiet: bool) -> dict[str, Score]:
        """Scores pieces in one call.

        Raises:
            UserError: the model failed, or did not read or score all tokens; says where the run stood.
        """
        batch, hook = [(self._key(name), *pair) for name, pair in pairs.items()], self.lm.cache_hook
        in_float32 = getattr(self.lm, "softmax_dtype", True) is None  # `hf` adds in the model's type unless told
        began = time.perf_counter()
        try:
            if in_float32:
                self.lm.softmax_dtype = torch.float32
            with whole_answers(self.lm, self.name):
                answers = self.lm._loglikelihood_tokens(batch, disable_tqdm=quiet)
            scores = {
                name: Score(float(answer[0]), bool(answer[1])) for name, answer in zip(pairs, answers, strict=True)
            }
        except Exception as error:  # of any class: a server's, an engine's, or lm-eval's own for what it did not expect
            said = (
                str(error)
                if isinstance(error, UserError)
                else (f"Expected {self.name} to score tokens, found {type(error).__name__}: {first_line(error)}")
            )
            raise UserError(f"{said.rstrip('.')}; {self._standing(answered, pairs, planned)}.") from error
        finally:
            if in_float32:
                self.lm.softmax_dtype = None
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(context) + len(continuation) for context, continuation in pairs.values())
        for name, score in scores.items():
            if hook.dbdict is not None and math.isfinite(score.logprob) and self.kept(name) is None:
                hook.add_partial(_KIND, self._key(name), tuple(score))
        return scores
