"""What a user chooses with `--metadata`, checked once; and how context lengths are settled against corpus and model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from sbeval.errors import UserError

MOST_TARGETS = 256
BLOCKS_PER_DOCUMENT = 4
SEED = 1234
_LEAST_LIKENESS = 0.88


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Choices of one perplexity task.

    Attributes:
        context_lengths: lengths asked for in tokens, ascending, None for the defaults.
        data_path: local file or folder to read instead of the corpus's own source.
        dataset: hub dataset to read instead of the corpus's own source.
        dataset_config: configuration of the hub dataset.
        dataset_split: split of the hub dataset.
        text_field: field or column that holds the text.
        bos: "text" or "window", None for the tokenizer's default.
        separator: text between joined documents, None for the EOS token.
        targets_per_window: scored targets of a fixed-target window, None for the protocol's default.
        blocks_per_document: most target blocks one document gives.
        stride: new targets of a sliding window, None for half its length.
        longppl_evaluator: checkpoint or hub id of the model that chooses LongPPL's key tokens, None for no LongPPL.
        context: "document" or "stream", where a window's left context may come from; None for the protocol's default.
        max_length: longest input the model takes, None where no limit was given.
        seed: seed of sampling and of the bootstrap.
    """

    context_lengths: tuple[int, ...] | None = None
    data_path: Path | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = None
    text_field: str | None = None
    bos: str | None = None
    separator: str | None = None
    targets_per_window: int | None = None
    blocks_per_document: int = BLOCKS_PER_DOCUMENT
    stride: int | None = None
    longppl_evaluator: str | None = None
    context: str | None = None
    max_length: int | None = None
    seed: int = SEED

    @classmethod
    def from_metadata(cls, task: str, metadata: Mapping[str, Any]) -> Self:
        """Reads the settings out of lm-eval's metadata, which also holds the model's arguments.

        Raises:
            UserError: a value that cannot be, or a key that is nearly one of the settings.
        """
        _check_keys(task, metadata, [field.name for field in fields(cls)])
        path = metadata.get("data_path")
        return cls(
            context_lengths=_lengths(task, metadata.get("context_lengths")),
            data_path=None if path is None else Path(str(path)).expanduser(),
            dataset=_text(task, "dataset", metadata.get("dataset")),
            dataset_config=_text(task, "dataset_config", metadata.get("dataset_config")),
            dataset_split=_text(task, "dataset_split", metadata.get("dataset_split")),
            text_field=_text(task, "text_field", metadata.get("text_field")),
            bos=_choice(task, "bos", metadata.get("bos"), ("text", "window")),
            separator=_text(task, "separator", metadata.get("separator")),
            targets_per_window=_count(task, "targets_per_window", metadata.get("targets_per_window")),
            blocks_per_document=_count(task, "blocks_per_document", metadata.get("blocks_per_document"))
            or BLOCKS_PER_DOCUMENT,
            stride=_count(task, "stride", metadata.get("stride")),
            longppl_evaluator=_text(task, "longppl_evaluator", metadata.get("longppl_evaluator")),
            context=_choice(task, "context", metadata.get("context"), ("document", "stream")),
            max_length=_count(task, "max_length", metadata.get("max_length")),
            seed=_seed(task, metadata.get("seed")),
        )


def _check_keys(task: str, metadata: Mapping[str, Any], known: list[str]) -> None:
    """Refuses misspelt settings. Other keys stay: arguments of the model and settings of other tasks are among them."""
    if "protocol" in metadata:
        raise UserError(
            f"{task}: expected the protocol in the task's name, found protocol {metadata['protocol']!r} in --metadata: "
            "name the task sb_<corpus>_<protocol>, with rolling, stream, sliding, fixed_target or position."
        )
    for key in metadata:
        near = get_close_matches(str(key), known, n=1, cutoff=_LEAST_LIKENESS)
        if key not in known and near:
            raise UserError(f"{task}: expected {near[0]} in --metadata, found {key}: correct the name.")


def _lengths(task: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not values or not all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in values):
        raise UserError(
            f"{task}: expected context_lengths as a list of positive whole numbers, found {value!r}: "
            "write --metadata '{\"context_lengths\": [1024, 4096]}'."
        )
    return tuple(sorted(set(values)))


def _count(task: str, name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{task}: expected {name} as a positive whole number, found {value!r}: set it to 1 or more.")
    return value


def _text(task: str, name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{task}: expected {name} as text, found {value!r}: put it in quotes.")
    return value


def _seed(task: str, value: Any) -> int:
    if value is None:
        return SEED
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{task}: expected seed as a whole number of at least 0, found {value!r}: set one.")
    return value


def _choice(task: str, name: str, value: Any, choices: tuple[str, ...]) -> str | None:
    if value is not None and value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise UserError(f"{task}: expected {name} as {expected}, found {value!r}: use one of these.")
    return None if value is None else str(value)
