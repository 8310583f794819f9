"""Which tensors of a checkpoint does the loaded model not read, and which of them may it leave unread?

A model may leave a tensor unread where transformers or the model itself declares that (`_declared`), or where the user
allows it (`allow_unread`). Every other tensor is an error: the numbers would be those of a part of the checkpoint.
"""

import contextlib
import dataclasses
import fnmatch
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

_MOVED_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # as transformers' own load report has them
_FILL = -1e4  # the least negative number that attention masks with
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnreadTensors:
    """Names of tensors that a checkpoint holds and the loaded model does not read, sorted.

    Attributes:
        allowed: those that the user's `allow_unread` names.
        declared: those that the model's class or its configuration declares: layers of multi-token prediction, heads
            and towers of the class that wrote the file, buffers that the model computes.
    """

    allowed: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.allowed or self.declared)

    def __or__(self, other: Self) -> "UnreadTensors":
        """Returns the tensors of both, such as those of a model and of its adapter."""
        return UnreadTensors(
            allowed=tuple(sorted({*self.allowed, *other.allowed})),
            declared=tuple(sorted({*self.declared, *other.declared})),
        )

    def to_json(self) -> dict[str, list[str]] | None:
        """Returns folded names (`folded`), None where every tensor was read."""
        return {"allowed": folded(self.allowed), "declared": folded(self.declared)} if self else None

    def sentence(self) -> str | None:
        """Returns how many tensors stay unread, why, and some of their names; None where every tensor was read."""
        parts = [
            f"{len(names)} tensors, {reason}: {some(folded(names))}"
            for names, reason in ((self.allowed, "allowed by allow_unread"), (self.declared, "as the model declares"))
            if names
        ]
        return "; ".join(parts) or None


Report = Callable[[UnreadTensors], None]
"""What takes the tensors that a load has left unread."""


def folded(names: Iterable[str]) -> list[str]:
    """Returns names with the numbers of layers and experts joined: `model.layers.2-3.mlp.up_proj.weight`, sorted."""
    numbers: dict[str, list[set[int]]] = {}
    for name in names:
        places = [int(number) for number in _NUMBER.findall(name)]
        seen = numbers.setdefault(_NUMBER.sub("*", name), [set() for _ in places])
        for held, number in zip(seen, places, strict=True):
            held.add(number)
    lines = []
    for pattern, places_of in numbers.items():
        ranges = iter([_ranges(held) for held in places_of])
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
    """Returns unread tensors that the user allows.

    `reader` does not read them, `place` holds them, and `mend` says which settings are wrong as a rule. `allow_unread`
    is None where the user cannot allow any.

    Raises:
        UserError: naming those that no pattern of `allow_unread` matches.
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
            f"Expected {reader} to read every tensor of {place}, found {count} that it does not read "
            f"({some(folded(refused))}): {remedy}."
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
    """Decides on the tensors that transformers' load report calls unexpected.

    `unexpected` are their names in `model`, without those that the model's class ignores; `folder` holds the files,
    None where they are not read here, as those of a GGUF file. `allow_unread` is None where the user cannot allow any.

    Raises:
        UserError: naming the tensors that nothing declares and `allow_unread` does not name.
    """
    left = set(unexpected)
    mend = "the number of layers, biases, quantization_config or the model type in config.json"
    said = {"reader": f"{type(model).__name__} with its configuration", "place": name, "mend": mend}
    if (weights := _weights(folder)) is None:
        return allowed_among(left, allow_unread, **said)
    names = _renamed(model, weights.names())
    owned = model.state_dict().keys()
    # a name that comes of several tensors, such as one for all experts, stands for them
    refused = {stored for stored, renamed in names.items() if renamed in left and renamed not in owned}
    refused |= left - {names[stored] for stored in refused}
    declared = {stored for stored in _ignored(model, names) if names[stored] not in owned} - refused
    if refused:
        buffers = {buffer for buffer, _ in model.named_buffers()} - owned
        harmless = {stored for stored in refused if {stored, names.get(stored)} & buffers}
        harmless |= {stored for stored in refused - harmless if stored in weights and _is_mask(weights, stored)}
        harmless |= _of_other_models(model, refused - harmless, weights.names(), folder, trust_remote_code)
        refused = refused - harmless
        declared = declared | harmless
    allowed = allowed_among(refused, allow_unread, **said)
    return dataclasses.replace(allowed, declared=tuple(sorted(declared)))


def _weights(folder: Path | None) -> Weights | None:
    with contextlib.suppress(UserError):
        return None if folder is None else Weights(folder)
    return None


def _ignored(model: Any, names: Mapping[str, str]) -> set[str]:
    """Returns the tensors that transformers leaves out of its load report, by their names in the file."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *_MOVED_BUFFERS]
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return {stored for stored, renamed in names.items() if ignored.search(renamed)}


def _renamed(model: Any, names: Sequence[str], conversions: Sequence[Any] | None = None) -> dict[str, str]:
    """Returns the name in `model` of each tensor of a file, found as transformers finds it."""
    transforms = get_model_conversion_mapping(model) if conversions is None else conversions
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    owned = model.state_dict()
    renamed = {}
    for name in names:
        target = rename_source_key(name, renamings, converters, model.base_model_prefix, owned)[0]
        if target not in owned and name in owned:
            target = name
        renamed[name] = target
    return renamed


def _is_mask(weights: Weights, name: str) -> bool:
    """Whether a tensor holds masks or positions, which attention computes by itself and older files hold.

    These are the number that masks are filled with, ones at and below the diagonal, and of whole numbers and truth
    values also those that are all equal or count up. Nothing else is read here.
    """
    shape = weights.shape(name)
    if shape == ():
        return bool(weights.read(name) <= _FILL)
    of_pairs = len(shape) > 1 and shape[-1] == shape[-2]
    whole = not weights.is_floating_point(name)
    if not whole and not (of_pairs and set(shape[:-2]) == {1}):
        return False
    values: Tensor = weights.read(name)
    if of_pairs and torch.equal(values, torch.ones_like(values).tril()):
        return True
    positions = torch.arange(shape[-1], dtype=torch.int64).expand(shape)
    return whole and (bool((values == values.flatten()[:1]).all()) or torch.equal(values.to(torch.int64), positions))


def _of_other_models(
    model: Any, names: set[str], stored: Sequence[str], folder: Path | None, trust_remote_code: bool
) -> set[str]:
    """Returns the names of tensors that belong to another model of this checkpoint, as transformers declares it.

    These are heads and towers of the classes that `architectures` of config.json names, and the layers of multi-token
    prediction that `num_mtp_layers` of the configuration counts. `stored` are the names of all tensors of the file.
    """
    if not names or folder is None:
        return set()
    found: set[str] = set()
    for other in _declared_models(model, folder, trust_remote_code):
        owned = other.state_dict().keys()
        renamed = _renamed(other, stored)
        found |= {name for name in names if renamed.get(name) in owned}
    return found | _of_token_prediction(model, names, stored)


def _declared_models(model: Any, folder: Path, trust_remote_code: bool) -> Iterable[PreTrainedModel]:
    """Yields a model without weights of each other class that config.json names."""
    with contextlib.suppress(Exception), quiet_transformers():  # of any class: it is a foreign file that says so
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
    """Returns the names of layers of multi-token prediction, which hold more than a layer of the model does."""
    count = getattr(model.config.get_text_config(), "num_mtp_layers", None)
    if not count:
        return set()
    with contextlib.suppress(Exception), quiet_transformers():  # not every model has such layers in transformers
        from transformers.modeling_layers import MtpModel  # not in every release

        with torch.device("meta"):
            other: Any = MtpModel(model, count)
        owned = other.state_dict().keys()
        renamed = _renamed(other, stored, other.get_weight_conversions(model))
        ignored = [re.compile(pattern) for pattern in other._keys_to_ignore_on_load_unexpected or ()]
        place = re.compile(r"(layers\.\d+\.)")
        # a layer of the model that is cut off has a block alone
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
