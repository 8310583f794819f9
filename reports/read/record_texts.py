"""Texts about facts in the record of a model, such as its RoPE scaling, its KV cache and its self-test."""

from collections.abc import Mapping
from typing import Any

from sbeval.foreign_files import fits
from sbeval.reports.read.fields import display_name
from sbeval.reports.read.runs import mapping
from sbeval.results.records import ModelRecord
from sbeval.rope_parameters import kind_of, rope_entries

_TENSORS_NAMED = 8
USUAL_GROUP = 64
"""Group size of quantized caches that a label does not name."""
_HASH_CHARACTERS = 8
_METHODS = {
    "self_extend": "SelfExtend",
    "dual_chunk": "dual chunks",
    "sink_window": "sink and window",
    "log_length": "log-length temperature",
}


def rope_scaling_text(scaling: Mapping[str, object] | None) -> str | None:
    """Returns RoPE scaling as text, such as "yarn RoPE x4", naming each type of layer; None without scaling."""
    parts = []
    for layers, entry in rope_entries(scaling).items():
        if (kind := kind_of(entry)) != "default":
            factor = entry.get("factor")
            times = f" x{factor:g}" if isinstance(factor, int | float) else ""
            parts.append(f"{kind} RoPE{times}" + (f" in {display_name(layers)} layers" if layers else ""))
    return " and ".join(parts) or None


def self_test_text(record: ModelRecord) -> str | None:
    """Returns the result of a model's self-test as a sentence; None if no self-test is recorded."""
    return sentence_text(record.self_test)


def sentence_text(recorded: Mapping[str, Any] | None) -> str | None:
    """Returns the entry `sentence` of a field of the model record; None if the field is None or has no such entry."""
    sentence = mapping(recorded).get("sentence")
    return display_name(sentence) if isinstance(sentence, str) else None


def unread_text(unread: Mapping[str, object] | None) -> str | None:
    """Returns, as text, the tensors of the checkpoint that the model did not load, and why; None if it loaded all."""
    reasons = {"allowed": "allowed by allow_unread", "declared": "as the model's class declares"}
    parts = []
    for name, reason in reasons.items():
        names = mapping(unread).get(name)
        if isinstance(names, list) and names:
            listed = ", ".join(display_name(str(tensor)) for tensor in names[:_TENSORS_NAMED])
            more = f" and {len(names) - _TENSORS_NAMED} more" if len(names) > _TENSORS_NAMED else ""
            parts.append(f"{listed}{more} ({reason})")
    return "; ".join(parts) or None


def switched_off_texts(record: ModelRecord) -> list[str]:
    """Returns a sentence for each modification of the loaded model that changed its logits and was undone."""
    notes = mapping(record.prepared).get("notes")
    return [display_name(note) for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def cut_texts(record: ModelRecord) -> list[str]:
    """Returns a sentence for each way in which generated answers were truncated.

    Base models rarely end an answer themselves, so their answers are usually truncated at the token budget. This is
    therefore mentioned only for chat models and models that think.
    """
    generated = mapping(record.generated)
    sentences = {
        "thinking_cut": "the model's thinking was cut before {}",
        "thinking_stopped": "the model ended its text without ending its thinking before {}",
    }
    if generated.get("chat") is True or record.thinking_tokens is not None:
        sentences["cut"] = "the budget of tokens cut {}"
    answers = f"of {generated.get('answers')} answers (on rank 0)."
    counts = {name: generated.get(name) for name in sentences}
    return [text.format(f"{counts[name]} {answers}") for name, text in sentences.items() if _is_count(counts[name])]


def _is_count(value: Any) -> bool:
    return fits(value, int) and bool(value)


def extrapolation_text(extrapolation: Mapping[str, object] | None) -> str | None:
    """Returns, as text, the method for attending beyond the training length, with its parameters; None without one."""
    method = (extrapolation or {}).get("method")
    if not extrapolation or not isinstance(method, str):
        return None
    numbers = [str(value) for value in extrapolation.values() if isinstance(value, int)]
    name = _METHODS.get(method, display_name(method))
    return f"{name} {'/'.join(numbers)}" if numbers else name


def cache_text(cache: Mapping[str, object] | None) -> str | None:
    """Returns, as text, the KV cache through which targets were scored; None if they were scored without one."""
    name = (cache or {}).get("cache")
    if not cache or not isinstance(name, str):
        return None
    if not isinstance(bits := cache.get("bits"), int):
        sha256, chunk = cache.get("function_sha256"), cache.get("chunk_tokens")
        file = f" of file {display_name(sha256[:_HASH_CHARACTERS])}" if isinstance(sha256, str) else ""
        chunks = f" in chunks of {chunk:,}" if isinstance(chunk, int) and chunk != 1 else ""
        return f"cache {display_name(name)}{file}{chunks}"
    group, backend = cache.get("group"), cache.get("backend")
    groups = "" if group == USUAL_GROUP or not isinstance(group, int) else f", groups of {group}"
    return f"{bits}-bit cache" + (f" by {display_name(backend)}" if isinstance(backend, str) else "") + groups
