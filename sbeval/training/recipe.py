"""Recipes: the settings of a training run, and the YAML files they are read from."""

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
"""What lies in a run's folder beside its checkpoint."""

Documents = Literal["separate", "joined"]


def _scaling(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    parse_rope_scaling(value)
    return value


class DataSettings(Settings):
    """What a run reads."""

    folder: Text = Field(description="Token arrays.")
    recall_share: Share = Field(default=0.0, description="Share of the windows that are recall text.")
    seed: WholeNumber = Field(default=0, description="Of the order of windows; runs to be compared share it.")
    validation_tokens: WholeNumber = Field(
        default=0,
        description="The last tokens of the text, kept out of training; the checkpoint's loss on them goes into its "
        "record, so that settings can be chosen without a look at any test text.",
    )
    allow_repeat: Flag = Field(default=False, description="Let a run be more than one epoch of the text.")


def usual_warmup_steps(*, total_tokens: int = 0, batch_tokens: int = 1, schedule: str = "cosine", **_: Any) -> int:
    """Returns the warm-up of a run of which none is asked for: a tenth of its steps, at most that of a long one.

    Before pydantic 2.14 it is asked for settings of which some are missing too, which are then refused.
    """
    return min(150 if schedule == "extension" else 200, total_tokens // batch_tokens // 10)


class OptimizationSettings(Settings):
    """How a run learns: AdamW on batches counted in tokens."""

    learning_rate: PositiveNumber = Field(description="At its peak.")
    total_tokens: WholeNumber = Field(description="The run stops after the last whole batch within it.")
    batch_tokens: Count = Field(description="Of one optimizer step.")
    micro_batch_tokens: Count | None = Field(
        default=None, description="Of one forward pass on one device; None takes the whole batch at once."
    )
    schedule: Literal["cosine", "warmup_stable_decay", "extension"] = Field(
        default="cosine", description="How the learning rate goes on from its peak."
    )
    warmup_steps: WholeNumber = Field(
        default_factory=lambda settings: usual_warmup_steps(**settings),
        description="Until the peak; a tenth of the steps where it is not given, at most 200, or 150 of an extension.",
    )
    weight_decay: Number = Field(default=0.1, description="On the matrices.")
    beta1: Number = Field(default=0.9, description="Decay of AdamW's first moment.")
    beta2: Number = Field(default=0.95, description="Decay of AdamW's second moment.")
    gradient_clip: PositiveNumber = Field(default=1.0, description="Largest norm of the gradient.")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        micro = self.micro_batch_tokens or self.batch_tokens
        if self.batch_tokens % micro:
            raise UserError(
                f"Expected a batch that is a multiple of the micro batch, found {self.batch_tokens} and {micro} "
                "tokens; change batch_tokens or micro_batch_tokens"
            )
        if self.total_tokens < self.batch_tokens:
            raise UserError(
                f"Expected at least one step of {self.batch_tokens} tokens, found {self.total_tokens} tokens in all; "
                "ask for more steps (total_tokens) or smaller batches (batch_tokens)"
            )
        if self.warmup_steps > self.steps:
            raise UserError(
                f"Expected the learning rate to reach its peak within the run's {self.steps} steps, found "
                f"{self.warmup_steps} steps of warm-up; lower warmup_steps (--warmup-steps)"
            )
        return self

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.total_tokens // self.batch_tokens


class TrainingSettings(Settings):
    """What a recipe and a context extension have in common."""

    optimization: OptimizationSettings = Field(description="How it is learnt.")
    precision: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description='"bfloat16" (autocast over fp32 weights) or "float32". The checkpoint is saved in float32 where '
        "that is asked for, else in bfloat16, or in its parent's type where it extends one.",
    )
    seed: WholeNumber = Field(default=0, description="Of random draws.")
    log_every_steps: Count = Field(default=50, description="Distance of the loss curve's points.")
    save_every_steps: Count = Field(
        default=2000, description="Distance of resumable states; a run also saves one when its time is up."
    )

    @property
    @abstractmethod
    def length_tokens(self) -> int:
        """Model inputs of a window."""

    @abstractmethod
    def memory_remedies(self) -> list[str]:
        """Returns what a user can do where a pass of the model does not fit into memory, best first."""


class TrainRecipe(TrainingSettings):
    """A training run."""

    name: Name = Field(description="Of the run and its checkpoint.")
    model: Options = Field(description="Keys of `SbevalConfig`; `training_length_tokens` is the length trained at.")
    data: DataSettings = Field(description="What is read.")

    @field_validator("model")
    @classmethod
    def _states_its_length(cls, model: Mapping[str, Any]) -> dict[str, Any]:
        key = "training_length_tokens"
        return {**model, key: read_value(Tokens, model.get(key), name=f"model.{key}")}

    @field_validator("name")
    @classmethod
    def _is_no_name_of_the_run_s_own(cls, name: str) -> str:
        if name.casefold() in RUN_FILES:
            raise UserError(
                f"Expected a recipe's name that the checkpoint can have, found {name!r}, which is the name of a file "
                "of the run; choose another"
            )
        return name

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        length, optimization = self.length_tokens, self.optimization
        if (optimization.micro_batch_tokens or optimization.batch_tokens) % length:
            raise UserError(
                f"Expected batches of whole windows of {length} tokens, found {optimization.batch_tokens} a batch and "
                f"{optimization.micro_batch_tokens} a micro batch; make both multiples of it"
            )
        return self

    @property
    def length_tokens(self) -> int:
        """Model inputs of a window."""
        length: int = self.model["training_length_tokens"]
        return length

    def memory_remedies(self) -> list[str]:
        """Returns what a user can do where a pass of the model does not fit into memory, best first."""
        length, optimization = self.length_tokens, self.optimization
        smaller = (optimization.micro_batch_tokens or optimization.batch_tokens) > length
        return [
            *([f"lower the tokens of a pass, as by --set optimization.micro_batch_tokens={length}"] if smaller else []),
            "use --fsdp on several GPUs",
            "lower model.training_length_tokens",
        ]


class Extension(TrainingSettings):
    """A context extension."""

    checkpoint: Text = Field(description="Folder or hub id of the parent.")
    data: LocalPath = Field(description="Token arrays or text (`extend`).")
    context_tokens: Tokens = Field(description="The new context.")
    documents: Documents = Field(
        default="separate", description='"separate" (documents do not see each other) or "joined".'
    )
    rope_scaling: Annotated[str, Expected("a scaling such as dynamic:4", _scaling)] | None = Field(
        default=None, description='Scaling to train with, such as "dynamic:4"; None keeps the parent\'s.'
    )
    allow_repeat: Flag = Field(default=False, description="Let a run be more than one epoch.")
    gradient_checkpointing: Flag = Field(
        default=False, description="Compute activations again in the backward pass instead of keeping them."
    )
    log_every_steps: Count = Field(default=10, description="Distance of the loss curve's points.")
    save_every_steps: Count = Field(default=250, description="Distance of resumable states.")

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        micro = self.optimization.micro_batch_tokens or self.optimization.batch_tokens
        if micro % self.context_tokens:
            raise UserError(
                f"Expected batches of whole windows of {self.context_tokens} tokens, found {micro}; "
                "make --batch-tokens and --micro-batch-tokens multiples of --context"
            )
        return self

    @property
    def length_tokens(self) -> int:
        """Model inputs of a window."""
        return self.context_tokens

    def memory_remedies(self) -> list[str]:
        """Returns what a user can do where a pass of the model does not fit into memory, best first."""
        micro = self.optimization.micro_batch_tokens or self.optimization.batch_tokens
        smaller = micro > self.context_tokens
        return [
            *([f"lower --micro-batch-tokens to {self.context_tokens}"] if smaller else []),
            *(["add --gradient-checkpointing"] if not self.gradient_checkpointing else []),
            "use --fsdp or --context-parallel on several GPUs",
            "lower --context",
        ]


def read_recipe(path: str | Path) -> TrainRecipe:
    """Reads a recipe file, or a shipped recipe by its name, as `read_mapping` does."""
    value, file = read_mapping(path)
    return TrainRecipe.read(value, place="the recipe", source=file.name)


def read_mapping(path: str | Path, folder: Path = RECIPE_FOLDER) -> tuple[dict[str, Any], Path]:
    """Returns the settings of a recipe file, and where it was found.

    A recipe with `based_on: NAME` holds what differs from that recipe, nested settings included. `path` is a YAML file,
    or the name of one in `folder`, beside the recipe that is based on it, or of one that is shipped (`demo_rope`).

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
    """Returns a recipe's settings with some of them changed, nested ones too."""
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
