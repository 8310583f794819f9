"""Tokens per second of model time over a run."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Meter:
    """Adds up what the model has read and how long that took.

    Attributes:
        tokens: input tokens run through the model, padding aside.
        seconds: time of the batches that finished.
    """

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds one finished batch."""
        self.tokens += tokens
        self.seconds += seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Average over the run; None before anything has run."""
        return self.tokens / self.seconds if self.seconds > 0 else None
