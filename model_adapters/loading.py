"""Loading errors in one sentence, and whether a tokenizer fits its model."""

import contextlib
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from sbeval.errors import UserError
from sbeval.model_adapters.batching import out_of_memory

logger = logging.getLogger(__name__)

_FAILURES = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError),
    *(SafetensorError, pickle.UnpicklingError, StrictDataclassError),
)


@contextlib.contextmanager
def loading(name: Any, what: str) -> Iterator[None]:
    """Turns what transformers raises for a checkpoint it cannot load into one sentence.

    Args:
        name: a folder, a hub id, or an object that is loaded already.
        what: what is being loaded, such as "a tokenizer".

    Raises:
        UserError: `name` is a string and loading it failed, or an argument is unknown.
    """
    try:
        yield
    except UserError:
        raise
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        raise UserError(
            f"Expected arguments that lm-eval's hf, this adapter or the model knows, found {unknown[1]}: correct it in "
            "--model_args."
        ) from error
    except ImportError as error:
        raise UserError(
            f"Expected the packages that {what} at pretrained={name} asks for, but {_first_line(error)}: install them, "
            "or leave out the argument of --model_args that asks for them."
        ) from error
    except _FAILURES as error:
        if not isinstance(name, str) or out_of_memory(error):
            raise
        place = Path(name)
        if "does not recognize this architecture" in str(error):
            reason = f"transformers does not know its model type ({_first_line(error)})"
            remedy = (
                "install the package that defines it, flash-linear-attention for fla's models, or pass "
                "trust_remote_code=True if you trust the code that the checkpoint brings along"
            )
        elif "contains custom code" in str(error):
            reason = "it runs code of its own"
            remedy = "read that code, and pass trust_remote_code=True if you trust it"
        elif place.is_dir():
            reason = f"the folder {name} does not hold one that can be read ({_first_line(error)})"
            remedy = "check that the checkpoint was saved completely with save_pretrained"
        elif place.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            reason = f"there is no such folder: {name}"
            remedy = "correct the path"
        else:
            reason = f"{name} is no folder here, and cannot be loaded from the hub ({_first_line(error)})"
            remedy = "correct the name, or check the network and the access rights"
        raise UserError(f"Expected {what} at pretrained={name}, but {reason}: {remedy}.") from error


def fit_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Checks that the model knows every token id, and gives the tokenizer a padding token that it knows.

    Raises:
        UserError: the tokenizer's ordinary tokens have ids beyond the model's embeddings.
    """
    entries = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    beyond = sorted(token for token, index in added.items() if index >= entries and token != tokenizer.pad_token)
    if beyond:  # no ordinary text holds them
        logger.warning("the model has no embedding for %s of its tokenizer: no text may hold them", ", ".join(beyond))
    highest = max((index for token, index in vocabulary.items() if token not in added), default=0)
    if highest >= entries:
        raise UserError(
            f"Expected a tokenizer whose ids fit the model's {entries} embeddings, found ids up to {highest}: pass the "
            "tokenizer this model was trained with as tokenizer=... in --model_args."
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= entries:
        # padding is masked, and what follows the end of an answer is cut: any token the model knows will do
        end = tokenizer.eos_token_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end if end is not None and end < entries else 0)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # a configuration's error names the field in its first line and what is wrong with it in the next
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
