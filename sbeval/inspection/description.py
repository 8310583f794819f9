"""What is said of a checkpoint: format, attention, sizes, lengths, RoPE, tokenizer, what is missing or unsupported."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbeval.checkpoints.facts import KvExpand, longest_input_tokens, text_config, training_length_tokens
from sbeval.checkpoints.files import find_folder, read_config
from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.checkpoints.registry import format_of_type
from sbeval.corpora.tokenizers import adds_bos, load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.inspection.sizes import Sizes, experts_of, sizes_of
from sbeval.inspection.weightless import Headers, assemble
from sbeval.models.learned_positions import learned_positions

_LENGTH_KEYS = (
    "training_length_tokens",
    "original_max_position_embeddings",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tokenizer:
    """What lies beside the weights to make tokens of text.

    Attributes:
        highest_id: the largest id of an ordinary token.
        adds_bos: whether it puts BOS before a text.
    """

    kind: str
    tokens: int
    highest_id: int
    adds_bos: bool
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What a checkpoint's configuration, headers and tokenizer say of it.

    Attributes:
        format: as loading names it, the generation of dolomite-engine included; None where it cannot be loaded.
        told_by: what shows the format.
        attention: the scheme, or a transformers model's type.
        training_length_tokens: before any RoPE scaling, None where nothing says it.
        training_length_from: the key that says it.
        learned_positions: how many the model has, None where they are not learned.
        rope: RoPE's parameters, its scaling among them; None where the model has none.
        tokenizer: None where the folder holds none that loads.
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
    problems: tuple[str, ...]


def describe(
    path_or_id: str | Path, *, dtype: str = "auto", kv_expand: KvExpand = "auto", revision: str | None = None
) -> Description:
    """Describes a checkpoint without reading a tensor.

    Args:
        path_or_id: a folder or a hub id.
        dtype: to load it in; "auto" keeps the checkpoint's.
        kv_expand: how dolomite's grouped stick-breaking heads share keys and values.
        revision: branch, tag or commit of a hub id.

    Raises:
        UserError: there is no checkpoint, a file is missing or damaged, or the configuration asks for more than the
            files can hold.
    """
    folder = find_folder(path_or_id, revision)
    source = read_config(folder)
    headers = Headers(folder)
    headers.check_sizes(source)
    wanted = None if dtype == "auto" else _floating(dtype)
    problems: list[str] = []
    name, model = None, None
    with quiet_transformers():
        try:
            name, model = assemble(folder, source, headers, kv_expand)
        except UserError as error:
            problems.append(str(error))
        tokenizer = _tokenizer(folder, problems)
    if model is not None and wanted is not None:
        model.to(wanted)
    config: Any = None if model is None else text_config(model.config)
    if tokenizer and config and tokenizer.highest_id >= config.vocab_size:
        problems.append(
            f"the tokenizer's ids go up to {tokenizer.highest_id}, and the model has {config.vocab_size} embeddings: "
            "name the right one with tokenizer=... in --model_args"
        )
    trained = None if config is None else training_length_tokens(model.config)  # type: ignore[union-attr]
    rope = getattr(config, "rope_parameters", None)
    return Description(
        folder=str(folder),
        format=name,
        told_by=tuple(_evidence(source, headers)),
        attention=None if config is None else _attention(config, name),
        details={} if config is None else _details(config),
        dtype=None if model is None else str(model.dtype).removeprefix("torch."),
        tensors=len(headers.names()),
        sizes=None if model is None else sizes_of(model),
        training_length_tokens=trained,
        training_length_from=_length_source(source, trained),
        longest_input_tokens=longest_input_tokens(str(folder)),
        learned_positions=None if model is None else learned_positions(model),
        rope=dict(rope) if rope else None,
        tokenizer=tokenizer,
        extended_from=getattr(config, "extended_from", None),
        problems=tuple(problems),
    )


def _floating(dtype: str) -> Any:
    import torch

    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UserError(f"Expected --dtype to be auto or a type such as bfloat16, found {dtype!r}: correct it.")
    return found


def _evidence(source: Mapping[str, Any], headers: Headers) -> list[str]:
    """Says what shows the format, and dolomite's generation."""
    model_type = source.get("model_type")
    found = [f"model_type {model_type!r} in config.json" if model_type else "no model_type in config.json"]
    released = format_of_type(str(model_type))
    if released is None or released.name != "dolomite":
        return found
    blocks = "sequence_mixer_blocks" in source
    found.append("its list sequence_mixer_blocks" if blocks else "no list of blocks in it")
    mixer = "sequence_mixer" if blocks else "attn"
    for tensor in ("head_bias", "norm.weight"):
        held = any(name.endswith(f".{mixer}.{tensor}") for name in headers.names())
        found.append(f"{'tensors' if held else 'no tensors'} {mixer}.{tensor}")
    return found


def _attention(config: Any, name: str | None) -> str:
    ours = config.model_type in ("sbeval", "moduleformer") and name is not None
    return str(getattr(config, "scheme", None) or config.attention) if ours else str(config.model_type)


def _details(config: Any) -> dict[str, Any]:
    """What else decides how attention is computed, where the configuration says it."""
    names = ("remainder", "head_norm", "attend_current", "qk_norm", "attention_multiplier", "sliding_window")
    found = {name: getattr(config, name, None) for name in names}
    kinds = getattr(config, "layer_types", None)
    experts, chosen, _, _ = experts_of(config)
    found["experts"] = f"{chosen} of {experts}" if experts else None
    found["layers"] = {kind: list(kinds).count(kind) for kind in dict.fromkeys(kinds)} if kinds else None
    return {name: value for name, value in found.items() if value not in (None, False, "none")}


def _length_source(source: Mapping[str, Any], length_tokens: int | None) -> str | None:
    """Returns the key of `config.json` that states the training length."""
    if length_tokens is None:
        return None
    part = source["text_config"] if isinstance(source.get("text_config"), dict) else source
    places = [("", part)]
    places += [
        (f" of {key}", part[key]) for key in ("rope_parameters", "rope_scaling") if isinstance(part.get(key), dict)
    ]
    for name in _LENGTH_KEYS:
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
