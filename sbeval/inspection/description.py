"""Describes a checkpoint: format, attention, sizes, lengths, RoPE, tokenizer, and missing or unsupported parts.

The model is built on the meta device: every tensor has its shape and dtype, but no data is read.
"""

import dataclasses
import functools
import itertools
import operator
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

from sbeval.caches.choice import CacheChoice
from sbeval.caches.suited import why_unsuited
from sbeval.checkpoints import facts
from sbeval.checkpoints.files import Weights, find_folder, read_config
from sbeval.checkpoints.fox_stickbreaking import is_fox_stickbreaking, keys_without_effect
from sbeval.checkpoints.load import build, from_transformers
from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.checkpoints.registry import format_of_type
from sbeval.checkpoints.unread import UnreadTensors, settle_unread_files
from sbeval.corpora.tokenizers import adds_bos, load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError, brief
from sbeval.inspection.memory import Sizes, experts_of, sizes_of
from sbeval.models.learned_positions import learned_positions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """Facts about a checkpoint's tokenizer; `highest_id` is the largest token id, not counting added tokens."""

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
    """Facts about a checkpoint, from its configuration, weight headers and tokenizer.

    Attributes:
        folder: the checkpoint's folder.
        format: name of the format, with the generation of dolomite-engine; None if the checkpoint cannot be loaded.
        evidence: the evidence by which the format was recognised.
        attention: attention scheme of this project's models, or the model type of a transformers model.
        details: other settings that change how attention is computed.
        dtype: dtype of the loaded weights.
        tensors: number of tensors in the weight files.
        sizes: sizes of the decoder, None if the configuration does not state them.
        training_length_tokens: training length before any RoPE scaling.
        training_length_from: the key of config.json that states the training length.
        longest_input_tokens: longest input that the configuration declares.
        learned_positions: number of learned position embeddings, None without.
        rope: RoPE parameters.
        tokenizer: the tokenizer, None if it does not load.
        extended_from: the parent of an extended checkpoint.
        unread: tensors that the model does not read: `allowed` by the user, or `declared` by the model's class.
        problems: one sentence for each missing or unsupported part.
        cache_unsuited: why the replaced KV cache that was asked about does not work with the model; None if it does.
    """

    folder: str
    format: str | None
    evidence: tuple[str, ...]
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
    cache_unsuited: str | None = None


def describe(
    path_or_id: str | Path,
    *,
    dtype: str = "auto",
    kv_expand: facts.KvExpand = "auto",
    allow_unread: Sequence[str] = (),
    tokenizer_source: str | None = None,
    cache: CacheChoice | None = None,
) -> Description:
    """Describes a checkpoint without reading its weights. Options that are not explained are as in `load_checkpoint`.

    `tokenizer_source` is a folder or hub id, None for the checkpoint's own tokenizer. `cache` is a replaced KV cache.

    Raises:
        UserError: there is no checkpoint, a file is missing or damaged, or the sizes in the configuration exceed those
            of the weight files.
    """
    folder = find_folder(path_or_id)
    source = read_config(folder)
    headers = Headers(folder)
    headers.check(source)
    target_dtype = None if dtype == "auto" else _floating(dtype)
    problems: list[str] = []
    name, model = None, None
    unread: list[UnreadTensors] = []
    with quiet_transformers():
        try:
            unread.append(settle_unread_files(headers, allow_unread))
            name, model = _assemble(folder, source, headers, kv_expand, allow_unread=allow_unread, report=unread.append)
        except UserError as error:
            problems.append(str(error))
        tokenizer = _tokenizer(tokenizer_source, folder, problems)
    config: Any = None if model is None else facts.text_config(model.config)
    if model is not None and target_dtype is not None:
        model.to(target_dtype)
    if tokenizer and config and tokenizer.highest_id >= config.vocab_size:
        problems.append(
            f"the tokenizer has ids up to {tokenizer.highest_id}, but the model has {config.vocab_size} embeddings: "
            "name the right tokenizer with tokenizer=... in --model_args"
        )
    trained = None if config is None else facts.training_length_tokens(model.config)  # type: ignore[union-attr]
    details = {} if config is None else _details(config, model)
    # the configuration of a hybrid has RoPE parameters even if its layers use no RoPE
    rope = None if "positions" in details else getattr(config, "rope_parameters", None)
    return Description(
        folder=str(folder),
        format=name,
        evidence=tuple(_evidence(source, headers)),
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
        extended_from=None if model is None else facts.extended_from(model.config),
        unread=functools.reduce(operator.or_, unread, UnreadTensors()),
        problems=tuple(problems),
        cache_unsuited=None if model is None or cache is None else why_unsuited(model.config, cache),
    )


class Headers(Weights):
    """A checkpoint's tensors on the meta device, with shapes and dtypes from the weight files' headers."""

    def _read(self, name: str) -> Tensor:
        path = self._path(name)
        if name in self._pickled:  # memory-mapped, not read
            return torch.empty_like(self._pickled[name], device="meta")
        with safe_open(path, framework="pt") as file:
            described = file.get_slice(name)
            kind = described.get_dtype()
        if kind not in str_to_torch_dtype:
            raise UserError(f"the tensor {name} has the dtype {brief(kind)}, which is not supported")
        return torch.empty(self.shape(name), dtype=str_to_torch_dtype[kind], device="meta")


def _assemble(
    folder: Path, source: Mapping[str, Any], headers: Headers, kv_expand: facts.KvExpand, **checked: Any
) -> tuple[str, PreTrainedModel]:
    """Builds the model without weights, by the code that loads it. Returns the format's full name and the model.

    Raises:
        UserError: loading would fail: a part is not supported, or a tensor is missing, unread or has the wrong shape.
    """
    released = format_of_type(str(source.get("model_type")))
    if released is not None:
        name, config, tensors = released.read(source, headers, kv_expand)
        return name, build(released.model_class, config, tensors, headers.dtype())
    model = from_transformers(str(folder), None, False, None, device_map="meta", **checked)
    return facts.checkpoint_format(model.config), model


def _floating(dtype: str) -> Any:
    """Returns the torch dtype with this name; a `UserError` if there is none or it is no floating-point type."""
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise UserError(f"Expected --dtype to be auto or a type such as bfloat16, found {dtype!r}: correct it.")
    return torch_dtype


def _evidence(source: Mapping[str, Any], headers: Headers) -> list[str]:
    """Lists the evidence for the format: the model type, and keys and tensors in which dolomite generations differ."""
    model_type = source.get("model_type")
    evidence = [f"model_type {model_type!r} in config.json" if model_type else "no model_type in config.json"]
    released = format_of_type(str(model_type))
    if released is None or not released.takes_kv_expand:
        return evidence
    if is_fox_stickbreaking(source, headers):
        evidence.append("tensor names of Lanni-ni/forgetting-transformer")
        if without_effect := keys_without_effect(source):
            evidence.append(f"its code does not compute {', '.join(without_effect)} as the names say")
        return evidence
    blocks = "sequence_mixer_blocks" in source
    evidence.append("its list sequence_mixer_blocks" if blocks else "no list of blocks in it")
    mixer = "sequence_mixer" if blocks else "attn"
    for tensor in ("head_bias", "norm.weight"):
        is_present = any(name.endswith(f".{mixer}.{tensor}") for name in headers.names())
        evidence.append(f"{'tensors' if is_present else 'no tensors'} {mixer}.{tensor}")
    return evidence


def _attention(config: Any, name: str | None) -> str:
    is_own_model = config.model_type in ("sbeval", "moduleformer") and name is not None
    return str(getattr(config, "scheme", None) or config.attention) if is_own_model else str(config.model_type)


_POSITIONS = re.compile(r"(^|[._])(rel|wpe|alibi|posit)")


def _details(config: Any, model: Any) -> dict[str, Any]:
    """Returns further settings of the configuration that change how attention is computed."""
    names = ("remainder", "head_norm", "attend_current", "qk_norm", "attention_multiplier", "sliding_window")
    details = {name: getattr(config, name, None) for name in names}
    kinds = getattr(config, "layer_types", None)
    experts, chosen, _, _ = experts_of(config)
    details["experts"] = f"{chosen} of {experts}" if experts else None
    rotates = getattr(config, "no_rope_layers", None)  # holds 1 for each layer with RoPE
    if isinstance(rotates, list) and rotates:
        details["layers that rotate"] = f"{sum(map(bool, rotates))} of {len(rotates)}"
    # a key that the configuration's class does not declare is ignored, since the model does not read it
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
    """Returns the number of layers of each kind, and for all but the commonest kind their indices from 0."""
    counts = Counter(kinds)
    commonest = counts.most_common(1)[0][0]
    indices: dict[str, list[str]] = {kind: [] for kind in counts}
    first = 0
    for kind, layers in itertools.groupby(kinds):
        last = first + len(list(layers)) - 1
        indices[kind].append(f"{first}-{last}" if last > first else str(first))
        first = last + 1
    return {
        kind: f"{n}" + (f" ({', '.join(indices[kind])})" if kind != commonest else "") for kind, n in counts.items()
    }


def _declares(config: Any, name: str) -> bool:
    """Whether a configuration's class, or one of its bases, annotates the attribute `name`."""
    return any(name in vars(kind).get("__annotations__", {}) for kind in type(config).__mro__)


def _length_source(source: Mapping[str, Any], length_tokens: int | None) -> str | None:
    """Returns which key of config.json states the training length."""
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


def _tokenizer(source: str | None, folder: Path, problems: list[str]) -> Tokenizer | None:
    """Describes the tokenizer; if it does not load, returns None and adds the reason to `problems`."""
    try:
        tokenizer = load_tokenizer(source) if source else load_tokenizer(folder, local_files_only=True)
    except UserError as error:
        problems.append(f"{str(error).removesuffix('.')}, with tokenizer=... in --model_args.")
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
