"""How the samples of one task fill each length: fitted when asked for, and kept on disk."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbeval.tasks.ruler.cache import cached_counts, read_fits, write_fits
from sbeval.tasks.ruler.drafts import Generator
from sbeval.tasks.ruler.fit import Fit, Fitter
from sbeval.tasks.ruler.prompt import Frame
from sbeval.tasks.ruler.tokens import TokenCounter

GENERATOR_VERSION = 3
_LIKE_ONE_ANOTHER = 4


class FittedSamples:
    """Fits the samples of one task to any length and frame.

    Args:
        task: its name.
        generator: makes the samples.
        facts: everything a sample depends on beside its index, the tokenizer included; JSON values.
        counter: the model's tokenizer.
        generated_tokens: tokens of each length kept free for the answer.
    """

    def __init__(
        self,
        task: str,
        generator: Generator,
        *,
        facts: Mapping[str, Any],
        counter: TokenCounter,
        generated_tokens: int,
    ) -> None:
        self._task = task
        self._generator = generator
        self._facts = facts
        self._counter = counter
        self._generated_tokens = generated_tokens

    def fits(self, indices: Sequence[int], length: int, frame: Frame) -> dict[int, Fit]:
        """Fits samples to a length, or reads how they were fitted before.

        Raises:
            UserError: one of them does not fit.
        """
        digest = self._digest(length, frame)
        kept = read_fits(digest)
        if missing := [index for index in indices if index not in kept]:
            made = self.fitter(length, frame).fit(missing)
            kept |= {index: dataclasses.asdict(fit) for index, fit in made.items()}
            write_fits(digest, kept)
        return {index: Fit(**kept[index]) for index in indices}

    def needed_tokens(self, samples: int, length: int, frame: Frame) -> int | None:
        """Returns the context that the first samples need where that is more than `length` tokens, else None.

        Samples differ in size, so all are counted where the first one alone needs a good part of the length.
        """
        fitter = self.fitter(length, frame)
        if length >= _LIKE_ONE_ANOTHER * fitter.minimum_length([0]):
            return None
        digest = self._digest(length, frame, minimum_of=samples)
        (needed,) = cached_counts(digest, lambda: np.array([fitter.minimum_length(range(samples))]))
        return int(needed) if needed > length else None

    def fitter(self, length: int, frame: Frame) -> Fitter:
        """Returns what fits samples to a length, with nothing kept on disk."""
        return Fitter(
            lambda index: self._generator.draft(index, length),
            context_length=length,
            generated_tokens=self._generated_tokens,
            frame=frame,
            counter=self._counter,
            task=self._task,
        )

    def _digest(self, length: int, frame: Frame, **more: int) -> str:
        facts = {
            **self._facts,
            **more,
            "generator": GENERATOR_VERSION,
            "task": self._task,
            "generated_tokens": self._generated_tokens,
            "length": length,
            "frame": dataclasses.asdict(frame),
            "special_tokens": self._counter.special_tokens,
            "sources": {name: importlib.metadata.version(name) for name in ("lm-eval", "wonderwords")},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
