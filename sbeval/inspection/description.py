"""What is said of a checkpoint: format, attention, sizes, lengths, RoPE, tokenizer, what is missing or unsupported.

The model is put together on the meta device: every tensor has its shape and dtype, and none has been read.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import str_to_torch_dtype

from sbeval.checkpoints import facts
from sbeval.checkpoints.files import Weights, find_folder, read_config
from sbeval.checkpoints.load import build, from_transformers
from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.checkpoints.registry import format_of_type
from sbeval.checkpoints.unread import UnreadTensors
from sbeval.corpora.tokenizers import adds_bos, load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError, shown
from sbeval.inspection.memory import Sizes, experts_of, sizes_of
from sbeval.models.learned_positions import learned_positions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """What lies beside the weights to make tokens of text; `highest_id` is the largest id of an ordinary token."""

    kind: str
    tokens: int
    highest_id: int
    adds_bos: bool
    sha256: str

    def __str__(self) -> str:
        bos = "adds" if self.adds_bos else "adds no"
        return f"{self.kind}, {self.tokens:,} tokens, {bos} BOS, sha256 {self.sha256[:12]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a checkpoint's configuration, headers and tokenizer say of it.

    Attributes:
        format: as loading names it, the generation of dolomite-engine included; None where it cannot be loaded.
        told_by: what shows the format.
        attention: the scheme, or a transformers model's type.
        training_length_tokens: before any RoPE scaling.
        training_length_from: the key that says it.
        unread: tensors that the model does not read: `allowed` by the user, or `declared` by the model's class.
        problems: sentences on what is missing or not supported; with `format` None the checkpoint cannot be loaded.
    """

    folder: str
    format: str | None
    told_by: tuple[str, ...]
    attention: str | None
    details: Mapping[str, Any]
    dtype: str | None
    tensors: int
    sizes: Sizes | None
    training_length_tokens: int | None
    training_length_from: str | None
    longest_input_tokens: int | None
    learned_positions: int | None
    rope: Mapping[str, Any] | None
    tokenizer: Tokenizer | None
    extended_from: Mapping[str, Any] | None
    unread: UnreadTensors
    problems: tuple[str, ...]


def describe(
    path_or_id: str | Path,
    *,
    dtype: str = "auto",
    kv_expand: facts.KvExpand = "auto",
    allow_unread: Sequence[str] = (),
) -> Description:
    """Describes a checkpoint without reading its weights; the options are those of `load_checkpoint`.

    Raises:
        UserError: there is no checkpoint, a file is missing or damaged, or the configuration asks for more than the
            files can hold.
    """
    folder = find_folder(path_or_id)
    source = read_config(folder)
    headers = Headers(folder)
    headers.check(source)
    wanted = None if dtype == "auto" else _floating(dtype)
    problems: list[str] = []
    name, model = None, None
    unread: list[UnreadTensors] = []
    with quiet_transformers():
        try:
            name, model = _assemble(folder, source, headers, kv_expand, allow_unread=allow_unread, report=unread.append)
        except UserError as error:
            problems.append(str(error))
        tokenizer = _tokenizer(folder, problems)
    config: Any = None if model is None else facts.text_config(model.config)
    if model is not None and wanted is not None:
        model.to(wanted)
    if tokenizer and config and tokenizer.highest_id >= config.vocab_size:
        problems.append(
            f"the tokenizer's ids go up to {tokenizer.highest_id}, and the model has {config.vocab_size} embeddings: "
            "name the right one with tokenizer=... in --model_args"
        )
    trained = None if config is None else facts.training_length_tokens(model.config)  # type: ignore[union-attr]
    details = {} if config is None else _details(config, model)
    # hybrids have RoPE's parameters also where their layers do not rotate
    rope = None if "positions" in details else getattr(config, "rope_parameters", None)
    return Description(
        folder=str(folder),
        format=name,
        told_by=tuple(_evidence(source, headers)),
        attention=None if config is None else _attention(config, name),
        details=details,
        dtype=None if model is None else str(model.dtype).removeprefix("torch."),
        tensors=len(headers.names()),
        sizes=None if model is None else sizes_of(model),
        training_length_tokens=trained,
        training_length_from=_length_source(source, trained),
        longest_input_tokens=facts.longest_input_tokens(str(folder)),
        learned_positions=None if model is None else learned_positions(model),
        rope=dict(rope) if rope else None,
        tokenizer=tokenizer,
        extended_from=getattr(config, "extended_from", None),
        unread=unread[0] if unread else UnreadTensors(),
        problems=tuple(problems),
    )


class Headers(Weights):
    """The tensors of a checkpoint as their headers describe them."""

    def _read(self, name: str) -> Tensor:
        path = self._path(name)
        if name in self._pickled:  # mapped into memory, not read
            return torch.empty_like(self._pickled[name], device="meta")
        with safe_open(path, framework="pt") as file:
            described = file.get_slice(name)
            kind = described.get_dtype()
        if kind not in str_to_torch_dtype:
            raise UserError(f"{name} holds numbers of the type {shown(kind)}, which is not supported")
        return torch.empty(self.shape(name), dtype=str_to_torch_dtype[kind], device="meta")


def _assemble(
    folder: Path, source: Mapping[str, Any], headers: Headers, kv_expand: facts.KvExpand, **checked: Any
) -> tuple[str, PreTrainedModel]:
    """Returns the format's full name and the model without its weights, put together as loading does it.

    Raises:
        UserError: what loading would refuse: a part that is not supported, or a tensor that is missing, unread or
            misshapen.
    """
    released = format_of_type(str(source.get("model_type")))
    if released is not None:
        name, config, tensors = released.read(source, headers, kv_expand)
        return name, build(released.model_class, config, tensors, headers.dtype())
    model = from_transformers(str(folder), None, False, None, device_map="meta", **checked)
    return facts.checkpoint_format(model.config), model


def _floating(dtype: str) -> Any:
    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise UserError(f"Expected --dtype to be auto or a type such as bfloat16, found {dtype!r}: correct it.")
    return named


def _evidence(source: Mapping[str, Any], headers: Headers) -> list[str]:
    """Says what shows the format, and dolomite's generation."""
    model_type = source.get("model_type")
    told = [f"model_type {model_type!r} in config.json" if model_type else "no model_type in config.json"]
    released = format_of_type(str(model_type))
    if released is None or not released.takes_kv_expand:
        return told
    blocks = "sequence_mixer_blocks" in source
    told.append("its list sequence_mixer_blocks" if blocks else "no list of blocks in it")
    mixer = "sequence_mixer" if blocks else "attn"
    for tensor in ("head_bias", "norm.weight"):
        held = any(name.endswith(f".{mixer}.{tensor}") for name in headers.names())
        told.append(f"{'tensors' if held else 'no tensors'} {mixer}.{tensor}")
    return told


def _attention(config: Any, name: str | None) -> str:
    ours = config.model_type in ("sbeval", "moduleformer") and name is not None
    return str(getattr(config, "scheme", None) or config.attention) if ours else str(config.model_type)


_POSITIONS = re.compile(r"(^|[._])(rel|wpe|alibi|posit)")


def _details(config: Any, model: Any) -> dict[str, Any]:
    """What else decides how attention is computed, where the configuration says it."""
    names = ("remainder", "head_norm", "attend_current", "qk_norm", "attention_multiplier", "sliding_window")
    details = {name: getattr(config, name, None) for name in names}
    kinds = getattr(config, "layer_types", None)
    experts, chosen, _, _ = experts_of(config)
    details["experts"] = f"{chosen} of {experts}" if experts else None
    rotates = getattr(config, "no_rope_layers", None)  # 1 where a layer does
    if isinstance(rotates, list) and rotates:
        details["layers that rotate"] = f"{sum(map(bool, rotates))} of {len(rotates)}"
    # a key that a model's class does not know decides nothing
    positions = (
        getattr(config, "position_embedding_type", None) if _declares(config, "position_embedding_type") else "rope"
    )
    if kinds and rotates is None and not any("rotary" in type(module).__name__.lower() for module in model.modules()):
        positions = None
    learned = any(_POSITIONS.search(name) for name, _ in model.named_parameters())
    if positions == "rope":
        details["positions"] = None
    else:
        details["positions"] = str(positions or ("learned" if learned else "no rotation"))
    details["layers"] = _places(list(kinds)) if kinds else None
    return {name: value for name, value in details.items() if value not in (None, False, "none")}


def _places(kinds: list[str]) -> dict[str, str]:
    """Returns how many layers are of each kind; of all but the commonest also which, from 0."""
    counts = Counter(kinds)
    commonest = counts.most_common(1)[0][0]
    places: dict[str, list[str]] = {kind: [] for kind in counts}
    first = 0
    for kind, layers in itertools.groupby(kinds):
        last = first + len(list(layers)) - 1
        places[kind].append(f"{first}-{last}" if last > first else str(first))
        first = last + 1
    return {kind: f"{n}" + (f" ({', '.join(places[kind])})" if kind != commonest else "") for kind, n in counts.items()}


def _declares(config: Any, name: str) -> bool:
    return any(name in vars(kind).get("__annotations__", {}) for kind in type(config).__mro__)


def _length_source(source: Mapping[str, Any], length_tokens: int | None) -> str | None:
    """Returns the key of `config.json` that states the training length."""
    if length_tokens is None:
        return None
    text = source["text_config"] if isinstance(source.get("text_config"), dict) else source
    scalings = (key for key in ("rope_parameters", "rope_scaling") if isinstance(text.get(key), dict))
    places = [("", text), *((f" of {key}", text[key]) for key in scalings)]
    for name in ("training_length_tokens", *facts.LENGTH_KEYS):
        for place, values in places:
            if values.get(name) == length_tokens:
                return f"{name}{place} in config.json"
    return "the default of its model type"


def _tokenizer(folder: Path, problems: list[str]) -> Tokenizer | None:
    try:
        tokenizer = load_tokenizer(folder, local_files_only=True)
    except UserError as error:
        problems.append(str(error))
        return None
    added = tokenizer.get_added_vocab()
    highest = max((index for token, index in tokenizer.get_vocab().items() if token not in added), default=0)
    return Tokenizer(
        kind=type(tokenizer).__name__,
        tokens=len(tokenizer),
        highest_id=highest,
        adds_bos=adds_bos(tokenizer),
        sha256=tokenizer_sha256(tokenizer),
    )
