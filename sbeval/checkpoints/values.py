"""The values of a foreign `config.json`: each of its kind, and no more asked for than the weight files can hold."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sbeval.checkpoints.ignored import OF_TRANSFORMERS, Ignored
from sbeval.errors import UserError, shown
from sbeval.foreign_files import fits, kind_text
from sbeval.rope_parameters import check_rope_values

T = TypeVar("T")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_key_value_heads", "num_heads", "num_kv_heads")
_ROWS = ("vocab_size", "intermediate_size", "n_inner", "ffn_dim", "att_hidden", "ffd_hidden", "gating_size", "head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "n_group")
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

_OF_GENERATION: dict[Any, str] = {
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
    """The values of a configuration, each checked for its kind as it is asked for; those nobody asked for are named.

    `place` is what it is, for messages.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "config.json") -> None:
        self._values = values
        self._place = place
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, kind: type[T], default: T | None) -> Any:
        """Returns a value, or the default where the key is absent; null is a value only where None is the default.

        Raises:
            UserError: the value is of another kind.
        """
        self._read.add(name)
        value = self._values.get(name, default)
        if not fits(value, kind) and not (value is None and default is None):
            raise self._wrong(name, _EXPECTED[kind], value)
        return value

    def count(self, *names: str, default: int | None) -> Any:
        """Returns the value of the first of these keys that is there: a whole number of at least 1."""
        name = next((name for name in names if name in self._values), names[0])
        value = self.get(name, int, default)
        if value is not None and value < 1:
            raise self._wrong(name, "a whole number of at least 1", value)
        return value

    def token(self, name: str, default: int | None = None) -> Any:
        """Returns a special token's id, or a list of ids, or None."""
        return self.get(name, _TOKENS, default)

    def part(self, name: str) -> "ConfigValues":
        """Returns the values of an object within, none where it is absent or null."""
        return ConfigValues(self.get(name, dict[str, Any], None) or {}, f"{name} in {self._place}")

    def parts(self, name: str) -> "list[ConfigValues]":
        """Returns the values of every object of a list, none where it is absent or null."""
        objects = self.get(name, list[dict[str, Any]], None) or []
        return [ConfigValues(values, f"{name}[{index}] in {self._place}") for index, values in enumerate(objects)]

    def one_of(self, name: str, allowed: Sequence[str], default: str) -> str:
        """Returns a value that is one of a few words, or the default where the key is absent."""
        value: str = self.get(name, str, default)
        if value not in allowed:
            raise UserError(f"{name} {shown(value)} in {self._place} is not supported; supported: {', '.join(allowed)}")
        return value

    def refuse_unread(self, ignored: Ignored, *, whole: bool = False) -> None:
        """Checks that every key was read or is in `ignored`: a number that another one changes would be wrong.

        Into a `whole` configuration transformers writes keys of its own.

        Raises:
            UserError: naming a key that was not read, its value, and what is supported.
        """
        allowed = {**OF_TRANSFORMERS, **ignored} if whole else ignored
        for name in sorted(set(self._values) - self._read):
            value = self._values[name]
            if name not in allowed:
                known = ", ".join(sorted(self._read | set(ignored)))
                raise UserError(
                    f"Expected keys whose meaning is known in {self._place}, found {shown(name)} with the value "
                    f"{shown(value)}, which may change every number; known are {known}"
                )
            values = allowed[name]
            if values is not None and not any(_same(value, supported) for supported in values):
                raise UserError(
                    f"{name} {shown(value)} in {self._place} is not supported; supported: "
                    f"{', '.join(json.dumps(supported) for supported in values)}"
                )

    def _wrong(self, name: str, expected: str, value: Any) -> UserError:
        there = "none" if value is None else shown(value)
        return UserError(f"Expected {name} in {self._place} to be {expected}, found {there}; mend the configuration")


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; `true` is no number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def check_generation(config: Any, embeddings: int) -> None:
    """Checks a generation configuration, which transformers does not, of a model that knows so many tokens.

    2.0 for a count becomes 2, and 2 for a share 2.0.

    Raises:
        UserError: a value is of another kind than its key's.
    """
    for kind, names in _OF_GENERATION.items():
        for name in names.split():
            value = getattr(config, name, None)
            expected = kind_text(kind)
            if kind == int | None and isinstance(value, float) and value.is_integer():
                setattr(config, name, value := int(value))
            if fits(value, kind):
                expected = "" if value is None else _other_than(name, value, embeddings)
            if expected:
                raise UserError(
                    f"Expected {name} in generation_config.json to be {expected}, found {shown(value)}; mend it"
                )
            if isinstance(value, int) and kind == float | None:
                setattr(config, name, float(value))


def _other_than(name: str, value: Any, embeddings: int) -> str:
    """Returns what a value of the right kind should be, if it is not that; empty if it is."""
    if name in _ABOVE_ZERO and value <= 0:
        return "above 0"
    if name == "bad_words_ids" and not (
        value and all(word and min(word) >= 0 and max(word) < embeddings for word in value)
    ):
        return f"lists of tokens that the model knows, from 0 to {embeddings - 1}"
    return ""


def check_sizes(config: Mapping[str, Any], *, tensors: int, weight_bytes: int) -> None:
    """Refuses a configuration that asks for more than weight files can hold, before anything of that size is made.

    A layer has at least one of their `tensors`, and a number takes at least one bit in any quantisation. What is left
    is checked tensor by tensor.

    Raises:
        UserError: naming the keys.
    """
    models = [config, *(config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict))]
    for model in models:
        for name in (*_LAYERS, *_WIDTHS, *_HEADS, *_ROWS):
            value = model.get(name)
            # some architectures have a list, one size a layer
            if not (value is None or isinstance(value, list) or (fits(value, int) and value > 0)):
                raise UserError(
                    f"Expected {name} in config.json to be a whole number of at least 1, found {shown(value)}; mend "
                    "the configuration"
                )
        for name in ("rope_parameters", "rope_scaling"):
            rope = model.get(name)
            # models with several kinds of layers keep one set of parameters for each
            for values in [rope, *rope.values()] if isinstance(rope, dict) else ():
                check_rope_values(values if isinstance(values, dict) else {})
        experts = max((value for name in _EXPERTS if fits(value := model.get(name), int)), default=None)
        for name, most in (*((name, experts) for name in _CHOSEN), ("topk_group", model.get("n_group"))):
            if fits(chosen := model.get(name), int) and fits(most, int) and 0 < most < chosen:
                raise UserError(
                    f"Expected {name} in config.json to be at most {most}, found {chosen}; mend the configuration"
                )
        for name in _LAYERS:
            if fits(layers := model.get(name), int) and layers > tensors:
                raise _too_large(f"{name} {layers}", f"{tensors} tensors")
        rows = {name: model.get(name) for name in (*_ROWS, *_HEADS, "shared_intermediate_size")}
        for width_name in _WIDTHS:
            for name, count in rows.items():
                width = model.get(width_name)
                if fits(count, int) and fits(width, int) and count * width > 8 * weight_bytes:
                    raise _too_large(f"{name} {count} by {width_name} {width}", f"{weight_bytes} bytes")


def names_quantisation(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says that weights are quantised, with a key of transformers' or of a model's own code."""
    places = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    return any("quant" in str(key) for place in places for key in place)


def _too_large(asked: str, held: str) -> UserError:
    return UserError(
        f"Expected a configuration that fits the weights, found {asked}, and weight files of at most {held}; mend the "
        "configuration or complete the download"
    )
