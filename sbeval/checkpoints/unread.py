"""Finds tensors of a checkpoint that the loaded model does not read, and decides whether that is an error.

A tensor may stay unread if the user allows it (`allow_unread`) or the checkpoint declares that it belongs to something
else: a class that `architectures` names, layers of multi-token prediction, keys that the model's class ignores, buffers
that the model computes. There is no list of tensor names; masks and positions of old files are recognised by their
values. Any other unread tensor is an error, since results would be those of a part of the checkpoint.
"""

import contextlib
import dataclasses
import fnmatch
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from sbeval.checkpoints.files import Weights, some
from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.errors import UserError
from sbeval.processes.ranks import is_first_process

logger = logging.getLogger(__name__)
_MOVED_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # transformers omits these from its load report too
_FILL = -1e4  # attention masks are filled with this number or a lower one
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnreadTensors:
    """Sorted names of tensors in a checkpoint that the loaded model does not read.

    Attributes:
        allowed: tensors that match the user's `allow_unread`.
        declared: tensors that the model's class or configuration declares as unread: layers of multi-token prediction,
            heads and encoders (such as a vision tower) of the class that wrote the file, buffers that the model
            computes.
    """

    allowed: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.allowed or self.declared)

    def __or__(self, other: Self) -> "UnreadTensors":
        """Returns the union, as for a model and its adapter."""
        return UnreadTensors(
            allowed=tuple(sorted({*self.allowed, *other.allowed})),
            declared=tuple(sorted({*self.declared, *other.declared})),
        )

    def to_json(self) -> dict[str, list[str]] | None:
        """Returns the names in short form (`folded`) for a results file, or None if every tensor was read."""
        return {"allowed": folded(self.allowed), "declared": folded(self.declared)} if self else None

    def sentence(self) -> str | None:
        """Describes how many tensors stay unread, why, and some of their names; None if every tensor was read."""
        parts = [
            f"{len(names)} tensors, {reason}: {some(folded(names))}"
            for names, reason in ((self.allowed, "allowed by allow_unread"), (self.declared, "as the model declares"))
            if names
        ]
        return "; ".join(parts) or None


Report = Callable[[UnreadTensors], None]
"""A callback that gets the tensors which a model left unread."""


def folded(names: Iterable[str]) -> list[str]:
    """Merges names that differ in layer or expert numbers, as in `model.layers.2-3.mlp.up_proj.weight`; sorted."""
    numbers: dict[str, list[set[int]]] = {}
    for name in names:
        name_numbers = [int(number) for number in _NUMBER.findall(name)]
        pattern_numbers = numbers.setdefault(_NUMBER.sub("*", name), [set() for _ in name_numbers])
        for all_numbers, number in zip(pattern_numbers, name_numbers, strict=True):
            all_numbers.add(number)
    lines = []
    for pattern, pattern_numbers in numbers.items():
        ranges = iter([_ranges(all_numbers) for all_numbers in pattern_numbers])
        lines.append(re.sub(r"\*", lambda _, ranges=ranges: next(ranges), pattern))  # type: ignore[misc]
    return sorted(lines)


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def allowed_among(
    names: Iterable[str], allow_unread: Sequence[str] | None, *, reader: str, place: str, mend: str
) -> UnreadTensors:
    """Checks that the user allows all of these unread tensors, and returns them.

    Args:
        names: names of the unread tensors.
        allow_unread: glob patterns of the user; None if the user has no such option.
        reader: what does not read the tensors, such as the name of a model, for the message.
        place: name of the checkpoint, for the message.
        mend: settings that are usually the cause, for the message.

    Raises:
        UserError: `allow_unread` does not match some of them; the message names these.
    """
    unread = sorted(names)
    patterns = allow_unread or ()
    refused = [name for name in unread if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if refused:
        count = f"{len(refused)} tensors" if len(refused) > 1 else "1 tensor"
        remedy = f"correct {mend}"
        if allow_unread is not None:
            remedy += (
                ", or allow it with allow_unread=true or with patterns of names such as "
                f"allow_unread={_NUMBER.sub('*', refused[0])}"
            )
        raise UserError(
            f"{reader} does not read {count} of {place} ({some(folded(refused))}), so results would be those of a "
            f"part of the checkpoint: {remedy}."
        )
    return UnreadTensors(allowed=tuple(unread))


def settle_unread(
    model: Any,
    unexpected: Iterable[str],
    folder: Path | None,
    *,
    name: str,
    allow_unread: Sequence[str] | None = None,
    trust_remote_code: bool = False,
) -> UnreadTensors:
    """Decides whether the tensors that transformers' load report calls unexpected may stay unread.

    Args:
        model: the loaded model.
        unexpected: their names after transformers' renaming, without those that the model's class ignores.
        folder: folder with the files, or None if they cannot be read here, as for a GGUF file.
        name: name of the checkpoint in messages.
        allow_unread: glob patterns of the user; None if the user has no such option.
        trust_remote_code: whether to run code from the checkpoint to read its configuration.

    Raises:
        UserError: a tensor is neither declared as unread nor matched by `allow_unread`.
    """
    unexpected_names = set(unexpected)
    mend = "the number of layers, biases, quantization_config or the model type in config.json"
    message_parts = {"reader": f"{type(model).__name__} with its configuration", "place": name, "mend": mend}
    if (weights := _weights(folder)) is None:
        return allowed_among(unexpected_names, allow_unread, **message_parts)
    names, model_names = _renamed(model, weights.names()), model.state_dict().keys()
    # transformers may merge several tensors into one, as for all experts; its name then stands for all of them
    refused = {
        stored for stored, renamed in names.items() if renamed in unexpected_names and renamed not in model_names
    }
    refused |= unexpected_names - {names[stored] for stored in refused}
    declared = {stored for stored in _ignored(model, names) if names[stored] not in model_names} - refused
    if refused:
        buffers = {buffer for buffer, _ in model.named_buffers()} - model_names
        harmless = {stored for stored in refused if {stored, names.get(stored)} & buffers}
        harmless |= {stored for stored in refused - harmless if stored in weights and _is_mask(weights, stored)}
        harmless |= _of_other_models(model, refused - harmless, weights.names(), folder, trust_remote_code)
        refused, declared = refused - harmless, declared | harmless
    allowed = allowed_among(refused, allow_unread, **message_parts)
    return dataclasses.replace(allowed, declared=tuple(sorted(declared)))


def settle_unread_files(weights: Weights, allow_unread: Sequence[str] | None = None) -> UnreadTensors:
    """Decides whether shards that no index names may stay unread; rank 0 logs the weight files that are not read.

    Args:
        weights: the checkpoint's weights.
        allow_unread: glob patterns of the user; None if the user has no such option.

    Raises:
        UserError: a shard has tensors that neither `weights` nor `allow_unread` names.
    """
    unread_files = weights.unread_files()
    unread = UnreadTensors()
    for path, names in unread_files.items():
        message_parts = {"reader": f"The model loaded from {weights.source}", "place": str(path)}
        mend = "the index of the shards, or move that file to another folder"
        unread |= allowed_among(names, allow_unread, mend=mend, **message_parts)
    if unread_files and is_first_process():
        files = some(path.name for path in unread_files)
        logger.warning("%s in %s: not read, since %s holds or names the weights", files, weights.folder, weights.source)
    return unread


def _weights(folder: Path | None) -> Weights | None:
    with contextlib.suppress(UserError):
        return None if folder is None else Weights(folder)
    return None


def _ignored(model: Any, names: Mapping[str, str]) -> set[str]:
    """Returns the tensors that transformers omits from its load report, by their names in the file."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *_MOVED_BUFFERS]
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return {stored for stored, renamed in names.items() if ignored.search(renamed)}


def _renamed(model: Any, names: Sequence[str], conversions: Sequence[Any] | None = None) -> dict[str, str]:
    """Maps each tensor name of a file to its name in `model`, with transformers' renaming rules."""
    transforms = get_model_conversion_mapping(model) if conversions is None else conversions
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    state_dict = model.state_dict()
    renamed = {}
    for name in names:
        target = rename_source_key(name, renamings, converters, model.base_model_prefix, state_dict)[0]
        if target not in state_dict and name in state_dict:
            target = name
        renamed[name] = target
    return renamed


def _is_mask(weights: Weights, name: str) -> bool:
    """Whether a tensor is an attention mask or a list of positions, which old files contain and models compute.

    A scalar with the fill value of masks or a lower triangle of ones is recognised, and among integers and booleans
    also a constant tensor or one that counts up from 0. Only tensors whose shape and dtype allow this are read.
    """
    shape = weights.shape(name)
    if shape == ():
        return bool(weights.read(name) <= _FILL)
    is_square = len(shape) > 1 and shape[-1] == shape[-2]
    is_integer = not weights.is_floating_point(name)
    if not is_integer and not (is_square and set(shape[:-2]) == {1}):
        return False
    values: Tensor = weights.read(name)
    if is_square and torch.equal(values, torch.ones_like(values).tril()):
        return True
    if not is_integer:
        return False
    positions = torch.arange(shape[-1], dtype=torch.int64).expand(shape)
    is_constant = bool((values == values.flatten()[:1]).all())
    return is_constant or torch.equal(values.to(torch.int64), positions)


def _of_other_models(
    model: Any, names: set[str], stored: Sequence[str], folder: Path | None, trust_remote_code: bool
) -> set[str]:
    """Returns the names of tensors that belong to another model in this checkpoint.

    These are heads and encoders (such as a vision tower) of the classes that `architectures` in config.json names, and
    layers of multi-token prediction, whose number is `num_mtp_layers` in config.json. `stored` are the names of all
    tensors of the file.
    """
    if not names or folder is None:
        return set()
    of_declared: set[str] = set()
    for other in _declared_models(model, folder, trust_remote_code):
        owned, renamed = other.state_dict().keys(), _renamed(other, stored)
        of_declared |= {name for name in names if renamed.get(name) in owned}
    return of_declared | _of_token_prediction(model, names, stored)


def _declared_models(model: Any, folder: Path, trust_remote_code: bool) -> Iterable[PreTrainedModel]:
    """Yields a model on the meta device for each class in `architectures` other than that of `model`."""
    with contextlib.suppress(Exception), quiet_transformers():  # classes named in a file may fail to build in any way
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        for architecture in getattr(config, "architectures", None) or ():
            kind: Any = getattr(transformers, architecture, None)
            if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel) or isinstance(model, kind):
                continue
            if isinstance(config, kind.config_class or ()):
                with torch.device("meta"):
                    other: PreTrainedModel = kind(config)
                yield other


def _of_token_prediction(model: Any, names: set[str], stored: Sequence[str]) -> set[str]:
    """Returns the names of tensors in layers of multi-token prediction.

    Such a layer is recognised by tensors beside its decoder block, which an ordinary decoder layer does not have.
    """
    count = getattr(model.config.get_text_config(), "num_mtp_layers", None)
    if not count:
        return set()
    with contextlib.suppress(Exception), quiet_transformers():  # not every model has such layers in transformers
        from transformers.modeling_layers import MtpModel  # not in every release

        with torch.device("meta"):
            other: Any = MtpModel(model, count)
        owned = other.state_dict().keys()
        renamed = _renamed(other, stored, _conversions_of_token_prediction(other, model, count))
        ignored = [re.compile(pattern) for pattern in other._keys_to_ignore_on_load_unexpected or ()]
        place = re.compile(r"(layers\.\d+\.)")
        # a decoder layer that the configuration cuts off has only a block, and must not count as a prediction layer
        layers = {
            match[1]
            for name in names
            if renamed[name] in owned and ".mtp_block." not in renamed[name] and (match := place.match(renamed[name]))
        }
        return {
            name
            for name in names
            if renamed[name].startswith(tuple(layers))
            and (renamed[name] in owned or any(pattern.search(renamed[name]) for pattern in ignored))
        }
    return set()


def _conversions_of_token_prediction(other: Any, model: Any, count: int) -> Sequence[Any]:
    if hasattr(other, "get_weight_conversions"):  # from transformers 5.20 on
        conversions: Sequence[Any] = other.get_weight_conversions(model)
        return conversions
    layers = model.config.get_text_config().num_hidden_layers
    renamings = [
        WeightRenaming(source_patterns=f"layers.{n}.", target_patterns=f"layers.{n - layers}.mtp_block.")
        for n in range(layers, layers + count)
    ]
    of_layers = get_model_conversion_mapping(other, add_legacy=False)
    return [*renamings, *of_layers, *get_model_conversion_mapping(model)]
