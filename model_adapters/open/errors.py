"""Turns exceptions of transformers and peft during loading into a `UserError`: one sentence with reason and remedy."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, first_line, panics_as_errors, raised_here
from sbeval.model_adapters.batching import out_of_memory

_SAVED_ATTENTION = "_attn_implementation"  # the key in config.json
_QUANTISING = ("load_in_4bit", "load_in_8bit", "autogptq", "gptqmodel")


@contextlib.contextmanager
def explaining_load_errors(
    name: Any,
    what: str,
    *,
    argument: str = "pretrained",
    given: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Inside this context, turns any exception of a library that loads a model into a `UserError` of one sentence.

    Args:
        name: the folder or hub id that is being loaded, or a model in memory.
        what: the kind of thing that is being loaded, such as "a tokenizer".
        argument: the argument of `--model_args` that contains `name`.
        given: the other arguments, which may request the feature that fails, such as an attention implementation.
        config: the contents of config.json, which may request such a feature, too.

    Raises:
        UserError: `name` is a string and loading it failed, or an argument is unknown.
    """
    try:
        with panics_as_errors():
            yield
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers raise any class for a broken file, even bare Exception
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if isinstance(error, TypeError) and unknown is not None:
            expected = "Expected arguments that lm-eval's hf, this adapter or the model knows"
            raise UserError(f"{expected}, found {unknown[1]}: correct it in --model_args.") from error
        missing_package = isinstance(error, ImportError)
        if not missing_package and (not isinstance(name, str) or out_of_memory(error) or raised_here(error)):
            raise
        reason, remedy = _fault(str(name), what, argument, error, given or {}, config or {})
        place = f"{argument}={name}" if isinstance(name, str) else "the model in memory"
        raise UserError(f"Expected {what} at {place}, but {reason}: {remedy}.") from error


def _fault(
    name: str, what: str, argument: str, error: Exception, given: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, str]:
    """Returns the reason why something cannot be loaded, and the remedy."""
    reason, place = first_line(error), Path(name)
    folder, gguf_file = place / str(given.get("subfolder") or ""), given.get("gguf_file")
    if re.search("attn_implementation|attention implementation|Flash ?Attention", str(error)):
        return f"this attention implementation cannot be used ({reason})", _other_attention(given, config)
    if isinstance(error, ImportError):
        return f"a package is missing ({reason})", f"install the package{_quantisation_instead(given, config)}"
    if "does not recognize this architecture" in str(error):
        return (
            f"transformers does not know its model type ({reason})",
            "install the package that defines it, flash-linear-attention for fla's models, or pass "
            "trust_remote_code=True if you trust the code that the checkpoint brings along",
        )
    if "contains custom code" in str(error):
        return "it runs code of its own", "read that code, and pass trust_remote_code=True if you trust it"
    if gguf_file and place.is_dir():
        file = folder / str(gguf_file)
        if not file.is_file():
            return f"there is no file {file}", "correct gguf_file in --model_args"
        return (
            f"{file} does not hold {what} that transformers can read ({reason})",
            "copy the file again or take another; if transformers does not know its architecture, load the checkpoint "
            "that it was made from",
        )
    if place.is_dir():
        if not folder.is_dir():
            return f"there is no folder {folder}", "correct subfolder in --model_args"
        complete = "check that the checkpoint was saved completely with save_pretrained"
        other = ", or name another with tokenizer=..." if what == "a tokenizer" and argument == "pretrained" else ""
        return f"the folder {folder} does not hold {what} that can be read ({reason})", complete + other
    if place.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return f"there is no such folder: {name}", "correct the path"
    revision = " or the revision" if given.get("revision") not in (None, "main") else ""
    return (
        f"{name} is no folder here, and cannot be loaded from the hub ({reason})",
        f"correct the name{revision}, or check the network and the access rights",
    )


def _other_attention(given: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns the remedy for an attention implementation that cannot be used: the argument that names another one."""
    if any(_SAVED_ATTENTION in part for part in _parts(config)):
        return f"take {_SAVED_ATTENTION} out of config.json, which counts before attn_implementation in --model_args"
    if given.get("attn_implementation") is not None:
        return "leave attn_implementation out of --model_args, or name another"
    if any("attn_implementation" in part for part in _parts(config)):
        return "pass attn_implementation=sdpa or eager in --model_args, which counts before that of config.json"
    return "pass attn_implementation=sdpa or eager in --model_args"


def _quantisation_instead(given: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns a second remedy for a missing package: to load without quantisation, if that was requested; else ""."""
    if arguments := [name for name in _QUANTISING if given.get(name)]:
        return f", or leave {', '.join(arguments)} out of --model_args"
    if any("quantization_config" in part for part in _parts(config)):
        return ", or take a checkpoint whose weights are not quantised"
    return ""


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(part for part in config.values() if isinstance(part, Mapping))]
