"""Recipes: the settings of a training run or an extension, and how recipe files (YAML) are read."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sbeval.errors import UserError
from sbeval.foreign_files import read_yaml
from sbeval.keeping.writing import LOCK
from sbeval.rope_parameters import parse_rope_scaling
from sbeval.settings import (
    Count,
    Expected,
    Flag,
    LocalPath,
    Name,
    Number,
    Options,
    PositiveNumber,
    Settings,
    Share,
    Text,
    Tokens,
    WholeNumber,
    read_value,
)

RECIPE_FOLDER = Path(__file__).parent / "recipes"
RUN_FILES = frozenset({"run.json", "runs.jsonl", "training_log.jsonl", "states", LOCK, "held_out", "results", "report"})
"""Names of the files and folders in a run's folder; the checkpoint's folder must have another name."""

Documents = Literal["separate", "joined"]


def _scaling(value: Any) -> str:
    """Checks a value of `rope_scaling`; raises a `ValueError` or `UserError` if it is not valid."""
    if not isinstance(value, str):
        raise ValueError
    parse_rope_scaling(value)
    return value


class DataSettings(Settings):
    """The data of a training run."""

    folder: Text = Field(description="Folder of token arrays.")
    recall_share: Share = Field(default=0.0, description="Share of the windows that are recall text.")
    seed: WholeNumber = Field(
        default=0, description="Seed of the order of windows; give the same to runs that you compare."
    )
    validation_tokens: WholeNumber = Field(
        default=0,
        description="Tokens at the end of the text to hold out of training. The checkpoint's loss on them is in its "
        "training record, so that settings can be chosen without test text.",
    )
    allow_repeat: Flag = Field(default=False, description="Allow more than one epoch of the text.")


def usual_warmup_steps(*, total_tokens: int = 0, batch_tokens: int = 1, schedule: str = "cosine", **_: Any) -> int:
    """Returns the default number of warm-up steps: a tenth of all steps, at most 200, or 150 for an extension.

    The arguments have defaults because pydantic before 2.14 calls this even if required settings are missing; pydantic
    refuses such settings afterwards.
    """
    return min(150 if schedule == "extension" else 200, total_tokens // batch_tokens // 10)


class OptimizationSettings(Settings):
    """Optimizer and schedule: AdamW on batches counted in tokens."""

    learning_rate: PositiveNumber = Field(description="Peak learning rate.")
    total_tokens: WholeNumber = Field(description="Tokens to train on; the run stops after the last full batch.")
    batch_tokens: Count = Field(description="Tokens of one optimizer step.")
    micro_batch_tokens: Count | None = Field(
        default=None, description="Tokens of one forward pass on one device; None runs the whole batch at once."
    )
    schedule: Literal["cosine", "warmup_stable_decay", "extension"] = Field(
        default="cosine", description="Learning-rate schedule after warm-up."
    )
    warmup_steps: WholeNumber = Field(
        default_factory=lambda settings: usual_warmup_steps(**settings),
        description="Steps of linear warm-up. By default a tenth of all steps, at most 200 (150 for an extension).",
    )
    weight_decay: Number = Field(
        default=0.1, description="Weight decay, as transformers' Trainer applies it: not to biases and norms."
    )
    beta1: Number = Field(default=0.9, description="Decay of AdamW's first moment.")
    beta2: Number = Field(default=0.95, description="Decay of AdamW's second moment.")
    gradient_clip: PositiveNumber = Field(default=1.0, description="Gradients are clipped to this norm.")

    @model_validator(mode="after")
    def _check_batches_and_steps(self) -> Self:
        micro = self.micro_batch_tokens or self.batch_tokens
        if self.batch_tokens % micro:
            raise UserError(
                f"Expected batch_tokens to be a multiple of micro_batch_tokens, found {self.batch_tokens} and {micro} "
                "tokens; change one of them"
            )
        if self.total_tokens < self.batch_tokens:
            raise UserError(
                f"Expected total_tokens of at least one step of {self.batch_tokens} tokens, found {self.total_tokens}; "
                "raise total_tokens (the number of steps) or lower batch_tokens"
            )
        if self.warmup_steps > self.steps:
            raise UserError(
                f"Expected at most {self.steps} warm-up steps, the steps of the whole run, found {self.warmup_steps}; "
                "lower warmup_steps (--warmup-steps)"
            )
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.total_tokens // self.batch_tokens


class TrainingSettings(Settings):
    """Settings that a training run from scratch and a context extension have in common."""

    optimization: OptimizationSettings = Field(description="Optimizer and schedule.")
    precision: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description='"bfloat16" (autocast over fp32 weights) or "float32". With "float32" the checkpoint is saved in '
        "float32, else in bfloat16, or in its parent's dtype if it extends one.",
    )
    seed: WholeNumber = Field(
        default=0, description="Random seed: initial weights, and in an extension the order of windows."
    )
    log_every_steps: Count = Field(default=50, description="Steps between points of the loss curve.")
    save_every_steps: Count = Field(
        default=2000, description="Steps between resumable states; a run also saves one when its time is up."
    )

    @property
    @abstractmethod
    def length_tokens(self) -> int:
        """Length of a training window, in model inputs."""

    @abstractmethod
    def memory_remedies(self) -> list[str]:
        """Returns remedies for a user if a forward and backward pass does not fit into memory, best first."""


class TrainRecipe(TrainingSettings):
    """The settings of a training run (`sbeval train`)."""

    name: Name = Field(description="Name of the run and its checkpoint.")
    model: Options = Field(description="Keys of `SbevalConfig`; `training_length_tokens` is the training length.")
    data: DataSettings = Field(description="Training data.")

    @field_validator("model")
    @classmethod
    def _check_training_length(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        key = "training_length_tokens"
        return {**model, key: read_value(Tokens, model.get(key), name=f"model.{key}")}

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name.casefold() in RUN_FILES:
            raise UserError(
                f"A recipe cannot be named {name!r}: its checkpoint would replace a file of the run; rename it"
            )
        return name

    @model_validator(mode="after")
    def _check_windows_fit(self) -> Self:
        length, optimization = self.length_tokens, self.optimization
        if (optimization.micro_batch_tokens or optimization.batch_tokens) % length:
            raise UserError(
                f"Expected batch_tokens and micro_batch_tokens to be multiples of the window length, {length} tokens, "
                f"found {optimization.batch_tokens} and {optimization.micro_batch_tokens}; change them"
            )
        return self

    @property
    def length_tokens(self) -> int:
        """Length of a training window, in model inputs."""
        length: int = self.model["training_length_tokens"]
        return length

    def memory_remedies(self) -> list[str]:
        """Returns remedies for a user if a forward and backward pass does not fit into memory, best first."""
        length, optimization = self.length_tokens, self.optimization
        smaller = (optimization.micro_batch_tokens or optimization.batch_tokens) > length
        return [
            *([f"lower the tokens of a pass, as by --set optimization.micro_batch_tokens={length}"] if smaller else []),
            "use --fsdp on several GPUs",
            "lower model.training_length_tokens",
        ]


class Extension(TrainingSettings):
    """The settings of a context extension (`sbeval extend`)."""

    checkpoint: Text = Field(description="Folder or hub id of the checkpoint to extend (the parent).")
    data: LocalPath = Field(description="Token arrays or text.")
    context_tokens: Tokens = Field(description="New context length.")
    documents: Documents = Field(
        default="separate", description='"separate" (attention stays within a document) or "joined".'
    )
    rope_scaling: Annotated[str, Expected("a scaling such as dynamic:4", _scaling)] | None = Field(
        default=None, description='Scaling to train with, such as "dynamic:4"; None keeps the parent\'s.'
    )
    allow_repeat: Flag = Field(default=False, description="Allow more than one epoch.")
    gradient_checkpointing: Flag = Field(
        default=False, description="Recompute activations in the backward pass instead of storing them."
    )
    log_every_steps: Count = Field(default=10, description="Steps between points of the loss curve.")
    save_every_steps: Count = Field(default=250, description="Steps between resumable states.")

    @model_validator(mode="after")
    def _check_windows_fit(self) -> Self:
        micro = self.optimization.micro_batch_tokens or self.optimization.batch_tokens
        if micro % self.context_tokens:
            raise UserError(
                f"Expected --batch-tokens and --micro-batch-tokens to be multiples of --context {self.context_tokens}, "
                f"found {micro}; change them"
            )
        return self

    @property
    def length_tokens(self) -> int:
        """Length of a training window, in model inputs."""
        return self.context_tokens

    def memory_remedies(self) -> list[str]:
        """Returns remedies for a user if a forward and backward pass does not fit into memory, best first."""
        micro = self.optimization.micro_batch_tokens or self.optimization.batch_tokens
        smaller = micro > self.context_tokens
        return [
            *([f"lower --micro-batch-tokens to {self.context_tokens}"] if smaller else []),
            *(["add --gradient-checkpointing"] if not self.gradient_checkpointing else []),
            "use --fsdp or --context-parallel on several GPUs",
            "lower --context",
        ]


def read_recipe(path: str | Path) -> TrainRecipe:
    """Reads and checks a recipe file, or a shipped recipe by its name."""
    value, file = read_mapping(path)
    return TrainRecipe.read(value, place="the recipe", source=file.name)


def read_mapping(path: str | Path, folder: Path = RECIPE_FOLDER) -> tuple[dict[str, Any], Path]:
    """Reads a recipe's settings without checking them.

    A recipe may name another one with `based_on: NAME`. It then holds only the settings that differ from that recipe.

    Args:
        path: a YAML file, or the name of one in `folder` or among the shipped recipes (`demo_rope`).
        folder: folder to look in; for the name in `based_on` it is the folder of the recipe that contains `based_on`.

    Returns:
        The settings, and the file they were read from.

    Raises:
        UserError: there is no such file, or it holds no mapping.
    """
    file = _find(path, folder)
    value = read_yaml(file, "a recipe")
    if (base := value.pop("based_on", None)) is not None:
        base = read_value(Text, base, name="based_on of the recipe", source=file.name)
        value = merged(read_mapping(base, file.parent)[0], value)
    return value, file


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings `base` updated with `changes`; nested settings are merged, not replaced."""
    both = base | changes
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(base.get(key), dict):
            both[key] = merged(base[key], change)
    return both


def _find(path: str | Path, folder: Path) -> Path:
    for candidate in (
        Path(path),
        *(place / f"{path}{end}" for place in (folder, RECIPE_FOLDER) for end in ("", ".yaml")),
    ):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml")))
    raise UserError(f"no recipe file at {path}: give a YAML file or one of the shipped recipes ({known})")
