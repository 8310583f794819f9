"""Checks the values of a config.json: their types, unknown keys, and whether the weight files are large enough."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sbeval.checkpoints.ignored import TRANSFORMERS, Ignored
from sbeval.errors import UserError, brief
from sbeval.foreign_files import fits, kind_text
from sbeval.rope_parameters import check_rope_values

T = TypeVar("T")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_key_value_heads", "num_heads", "num_kv_heads")
_SIZES = (
    "vocab_size",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "att_hidden",
    "ffd_hidden",
    "gating_size",
    "head_dim",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "n_group")
_TOKENS: Any = int | list[int] | None
_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict[str, Any]: "an object",
    list[dict[str, Any]]: "a list of objects",
    _TOKENS: "a token's id, a list of them, or null",
}

_GENERATION_TYPES: dict[Any, str] = {
    _TOKENS: """bos_token_id eos_token_id pad_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
        suppress_tokens begin_suppress_tokens""",
    list[list[int]] | None: "bad_words_ids",
    str | list[str] | None: "stop_strings",
    int | None: """max_length max_new_tokens min_length min_new_tokens num_beams num_return_sequences num_beam_groups
        top_k no_repeat_ngram_size encoder_no_repeat_ngram_size""",
    float | None: """temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty
        encoder_repetition_penalty length_penalty diversity_penalty guidance_scale penalty_alpha max_time""",
    bool | None: "do_sample use_cache renormalize_logits remove_invalid_values low_memory token_healing",
}
_ABOVE_ZERO = ("repetition_penalty", "encoder_repetition_penalty", "num_beams", "num_return_sequences")


class ConfigValues:
    """A configuration whose values are type-checked when read; `refuse_unread` finds the keys that were never read.

    `place` is the name of the configuration in error messages.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "config.json") -> None:
        self._values = values
        self._place = place
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, kind: type[T], default: T | None) -> Any:
        """Returns a value, or the default if the key is absent. A null is accepted only if the default is None.

        Raises:
            UserError: the value is not of type `kind`.
        """
        self._read.add(name)
        value = self._values.get(name, default)
        if not fits(value, kind) and not (value is None and default is None):
            raise self._wrong(name, _EXPECTED[kind], value)
        return value

    def count(self, *names: str, default: int | None) -> Any:
        """Returns the value of the first of these keys that is present, an integer of at least 1, or the default."""
        name = next((name for name in names if name in self._values), names[0])
        value = self.get(name, int, default)
        if value is not None and value < 1:
            raise self._wrong(name, "a whole number of at least 1", value)
        return value

    def token(self, name: str, default: int | None = None) -> Any:
        """Returns the id of a special token, a list of ids, or None."""
        return self.get(name, _TOKENS, default)

    def part(self, name: str) -> "ConfigValues":
        """Returns a nested object; an empty one if the key is absent or null."""
        return ConfigValues(self.get(name, dict[str, Any], None) or {}, f"{name} in {self._place}")

    def parts(self, name: str) -> "list[ConfigValues]":
        """Returns the objects of a list; an empty list if the key is absent or null."""
        objects = self.get(name, list[dict[str, Any]], None) or []
        return [ConfigValues(values, f"{name}[{index}] in {self._place}") for index, values in enumerate(objects)]

    def one_of(self, name: str, allowed: Sequence[str], default: str) -> str:
        """Returns a string that must be one of `allowed`, or the default if the key is absent."""
        value: str = self.get(name, str, default)
        if value not in allowed:
            raise UserError(f"{name} {brief(value)} in {self._place} is not supported; supported: {', '.join(allowed)}")
        return value

    def refuse_unread(self, ignored: Ignored, *, whole: bool = False) -> None:
        """Checks that every key was read or is listed in `ignored`; an unknown key might change every number.

        `whole` says that this is a complete config.json, in which keys of transformers are allowed too.

        Raises:
            UserError: a key is unknown, or has a value that is not supported.
        """
        allowed = {**TRANSFORMERS, **ignored} if whole else ignored
        for name in sorted(set(self._values) - self._read):
            value = self._values[name]
            if name not in allowed:
                known = ", ".join(sorted(self._read | set(ignored)))
                raise UserError(
                    f"{self._place} has the unknown key {brief(name)} with the value {brief(value)}, which might "
                    f"change every number; known keys are {known}"
                )
            values = allowed[name]
            if values is not None and not any(_same(value, supported) for supported in values):
                raise UserError(
                    f"{name} {brief(value)} in {self._place} is not supported; supported: "
                    f"{', '.join(json.dumps(supported) for supported in values)}"
                )

    def _wrong(self, name: str, expected: str, value: Any) -> UserError:
        actual = "none" if value is None else brief(value)
        return UserError(f"{name} in {self._place} must be {expected}, found {actual}; correct the configuration")


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; `true` differs from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def check_generation(config: Any, embeddings: int) -> None:
    """Checks the types in a generation configuration, which transformers does not do, and converts numbers.

    A float for an integer option becomes an integer if it is whole, and an integer for a float option a float.

    Args:
        config: the generation configuration; changed in place.
        embeddings: number of tokens that the model has embeddings for.

    Raises:
        UserError: a value has the wrong type or is out of range.
    """
    for expected_type, names in _GENERATION_TYPES.items():
        for name in names.split():
            value, requirement = getattr(config, name, None), kind_text(expected_type)
            if expected_type == int | None and isinstance(value, float) and value.is_integer():
                setattr(config, name, value := int(value))
            if fits(value, expected_type):
                requirement = "" if value is None else _violated_range(name, value, embeddings)
            if requirement:
                raise UserError(
                    f"{name} in generation_config.json must be {requirement}, found {brief(value)}; correct it"
                )
            if isinstance(value, int) and expected_type == float | None:
                setattr(config, name, float(value))


def _violated_range(name: str, value: Any, embeddings: int) -> str:
    """Returns the allowed range if a value of the right type is outside of it, otherwise an empty string."""
    if name in _ABOVE_ZERO and value <= 0:
        return "above 0"
    if name == "bad_words_ids" and not (
        value and all(word and min(word) >= 0 and max(word) < embeddings for word in value)
    ):
        return f"lists of tokens that the model knows, from 0 to {embeddings - 1}"
    return ""


def check_sizes(config: Mapping[str, Any], *, tensors: int, weight_bytes: int) -> None:
    """Checks that the weight files are large enough for a configuration, before a model of that size is built.

    Each layer needs at least one tensor, and each parameter at least one bit in any quantisation. Shapes are checked
    later, tensor by tensor.

    Args:
        config: contents of config.json.
        tensors: number of tensors in the files.
        weight_bytes: size of the files.

    Raises:
        UserError: a value is invalid or too large; the message names the key.
    """
    models = [config, *(config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict))]
    for model in models:
        for name in (*_LAYERS, *_WIDTHS, *_HEADS, *_SIZES):
            value = model.get(name)
            # some architectures have a list with one size for each layer
            if not (value is None or isinstance(value, list) or (fits(value, int) and value > 0)):
                raise UserError(
                    f"{name} in config.json must be a whole number of at least 1, found {brief(value)}; correct the "
                    "configuration"
                )
        for name in ("rope_parameters", "rope_scaling"):
            rope = model.get(name)
            # models with several layer types have one set of parameters for each type
            for values in [rope, *rope.values()] if isinstance(rope, dict) else ():
                check_rope_values(values if isinstance(values, dict) else {})
        experts = max((value for name in _EXPERTS if fits(value := model.get(name), int)), default=None)
        for name, most in (*((name, experts) for name in _CHOSEN_EXPERTS), ("topk_group", model.get("n_group"))):
            if fits(chosen := model.get(name), int) and fits(most, int) and 0 < most < chosen:
                raise UserError(
                    f"{name} in config.json must be at most {most}, found {chosen}; correct the configuration"
                )
        for name in _LAYERS:
            if fits(layers := model.get(name), int) and layers > tensors:
                raise _too_large(f"{name} {layers}", f"{tensors} tensors")
        rows = {name: model.get(name) for name in (*_SIZES, *_HEADS, "shared_intermediate_size")}
        for width_name in _WIDTHS:
            for name, count in rows.items():
                width = model.get(width_name)
                if fits(count, int) and fits(width, int) and count * width > 8 * weight_bytes:
                    raise _too_large(f"{name} {count} by {width_name} {width}", f"{weight_bytes} bytes")


def names_quantisation(config: Mapping[str, Any]) -> bool:
    """Whether a configuration, or an object in it, has a key with "quant" in its name: its weights may be quantised."""
    places = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    return any("quant" in str(key) for place in places for key in place)


def _too_large(required: str, available: str) -> UserError:
    return UserError(
        f"config.json does not fit the weights: it has {required}, but the weight files have only {available}; correct "
        "the configuration or complete the download"
    )
