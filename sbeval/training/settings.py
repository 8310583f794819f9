"""The settings of a training run, as a recipe writes them."""

import dataclasses
import math
from typing import Any

from sbeval.errors import UserError

SCHEDULES = ("cosine", "warmup_stable_decay", "extension")
PRECISIONS = ("bfloat16", "float32")


def at_least(name: str, value: int, least: int) -> None:
    """Refuses a setting below its least value."""
    if value < least:
        raise UserError(f"expected {name} of {least} or more, found {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What a run reads.

    Attributes:
        folder: token arrays, as `sbeval.training.tokenised` writes them.
        recall_share: share of the windows that are recall text.
        seed: of the order of windows; runs to be compared share it.
        validation_tokens: the last tokens of the text, kept out of training; the checkpoint's loss on them goes into
            its record, so that settings can be chosen without a look at any test text.
        allow_repeat: let a run be more than one epoch of the text.
    """

    folder: str
    recall_share: float = 0.0
    seed: int = 0
    validation_tokens: int = 0
    allow_repeat: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.recall_share < 1.0:
            raise UserError(f"expected recall_share from 0 to below 1, found {self.recall_share}")
        at_least("validation_tokens", self.validation_tokens, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """How a run learns: AdamW on batches counted in tokens.

    Attributes:
        learning_rate: at its peak.
        total_tokens: the run stops after the last whole batch within it.
        batch_tokens: of one optimizer step.
        micro_batch_tokens: of one forward pass on one device; None takes the whole batch at once.
        warmup_steps: until the peak.
        schedule: "cosine", "warmup_stable_decay" or "extension".
        weight_decay: on the matrices.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        gradient_clip: largest norm of the gradient.
    """

    learning_rate: float
    total_tokens: int
    batch_tokens: int
    micro_batch_tokens: int | None = None
    warmup_steps: int = 200
    schedule: str = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UserError(f"expected schedule to be one of {', '.join(SCHEDULES)}, found {self.schedule!r}")
        for name in ("learning_rate", "gradient_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"expected {name} above 0, found {getattr(self, name)}")
        at_least("batch_tokens", self.batch_tokens, 1)
        at_least("warmup_steps", self.warmup_steps, 0)
        micro = self.batch_tokens if self.micro_batch_tokens is None else self.micro_batch_tokens
        if micro < 1 or self.batch_tokens % micro:
            raise UserError(
                f"expected a batch that is a multiple of the micro batch, found {self.batch_tokens} and {micro} "
                "tokens; change batch_tokens or micro_batch_tokens"
            )
        if self.total_tokens < self.batch_tokens:
            raise UserError(
                f"expected at least one step of {self.batch_tokens} tokens, found {self.total_tokens} tokens in all; "
                "ask for more steps (total_tokens) or smaller batches (batch_tokens)"
            )
        if self.warmup_steps > self.steps:
            raise UserError(
                f"expected the learning rate to reach its peak within the run's {self.steps} steps, found "
                f"{self.warmup_steps} steps of warm-up; lower warmup_steps (--warmup-steps)"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.total_tokens // self.batch_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """A training run.

    Attributes:
        name: of the run and its checkpoint.
        model: keys of `SbevalConfig`; `training_length_tokens` is the length trained at.
        data: what is read.
        optimization: how it is learnt.
        precision: "bfloat16" (autocast over fp32 weights) or "float32".
        seed: of the initial weights.
        log_every_steps: distance of the loss curve's points.
        save_every_steps: distance of resumable states; a run also saves one when its time is up.
    """

    name: str
    model: dict[str, Any]
    data: DataSettings
    optimization: OptimizationSettings
    precision: str = "bfloat16"
    seed: int = 0
    log_every_steps: int = 50
    save_every_steps: int = 2000

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(f"expected precision to be one of {', '.join(PRECISIONS)}, found {self.precision!r}")
        length = self.model.get("training_length_tokens")
        if not isinstance(length, int):
            raise UserError(
                f"expected model: training_length_tokens in the recipe {self.name}, found {length!r}; add it"
            )
        at_least("training_length_tokens", length, 1)
        at_least("log_every_steps", self.log_every_steps, 1)
        at_least("save_every_steps", self.save_every_steps, 1)
        optimization = self.optimization
        if (optimization.micro_batch_tokens or optimization.batch_tokens) % length:
            raise UserError(
                f"expected batches of whole windows of {length} tokens, found {optimization.batch_tokens} a batch and "
                f"{optimization.micro_batch_tokens} a micro batch; make both multiples of it"
            )

    @property
    def length_tokens(self) -> int:
        """Model inputs of a window."""
        return int(self.model["training_length_tokens"])
