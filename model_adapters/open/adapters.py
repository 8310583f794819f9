"""Refuses PEFT adapters with missing weights, or with weights that are not loaded into the model (unread weights)."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.unread import Report, allowed_among
from sbeval.errors import UserError, brief, first_line
from sbeval.foreign_files import fits, read_json_object
from sbeval.model_adapters.batching import out_of_memory

_ADAPTER = "adapter_model.safetensors"
_MOST_RANK = 2**16


@contextlib.contextmanager
def whole_adapter(
    name: str | None, *, allow_unread: Sequence[str] | None = None, report: Report | None = None
) -> Iterator[None]:
    """Inside this context, checks a PEFT adapter while `hf` loads it: no weight may be missing or unread.

    peft only warns about missing weights, which then stay random, and says nothing about weights in the file that it
    does not load (unread weights). The context monkey-patches two methods of `peft.PeftModel` and turns that warning
    into an error.

    Args:
        name: the adapter's folder or hub id, None without an adapter.
        allow_unread: glob patterns of the names of weights that may stay unread.
        report: called with the names of the unread weights.

    Raises:
        UserError: the adapter cannot be loaded, or weights are missing or unread; the message names them.
    """
    if name is None:
        yield
        return
    if (Path(name) / _ADAPTER).is_file():
        _check_adapter(Path(name))
    import peft  # takes seconds to import, so only runs with an adapter import it

    original_load_adapter = peft.PeftModel.load_adapter

    @functools.wraps(original_load_adapter)
    def load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original_load_adapter(model, *args, **kwargs)
        # peft also lists the weights of learned prompts (prompt tuning) as unexpected, although it has loaded them
        if names := set(loaded.unexpected_keys):
            names -= peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        mend = "target_modules and the like in adapter_config.json, or name the model that the adapter was trained on"
        unread = allowed_among(
            names, allow_unread, mend=mend, reader="the model with its adapter", place=f"peft={name}"
        )
        if report is not None:
            report(unread)
        return loaded

    original_from_pretrained = peft.PeftModel.from_pretrained

    @functools.wraps(original_from_pretrained)
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        try:
            return original_from_pretrained(*args, **kwargs)
        except (UserError, UserWarning):
            raise
        except Exception as error:  # a broken adapter can raise any class
            if out_of_memory(error):
                raise
            raise UserError(
                f"Expected a PEFT adapter for this model at peft={name}, but it cannot be loaded "
                f"({first_line(error)}): check that it was saved completely, and that it belongs to this model."
            ) from error

    with contextlib.ExitStack() as stack:
        for name_of_method, before, during in (
            ("load_adapter", original_load_adapter, load_adapter),
            ("from_pretrained", original_from_pretrained, from_pretrained),
        ):
            setattr(peft.PeftModel, name_of_method, during)
            stack.callback(setattr, peft.PeftModel, name_of_method, before)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", message=".*missing adapter keys", category=UserWarning)
        try:
            yield
        except UserWarning as warning:
            expected = f"Expected an adapter that holds all its weights at peft={name}"
            remedy = "check that it was saved completely and belongs to this model"
            raise UserError(f"{expected}, found some missing ({first_line(warning)}): {remedy}.") from warning


def _check_adapter(folder: Path) -> None:
    """Refuses an adapter whose type is unknown, or whose LoRA rank is far above every dimension in its weights file."""
    import peft  # takes seconds to import, so only runs with an adapter import it

    source = read_json_object(folder / "adapter_config.json", "the configuration of an adapter")
    for key, known in (("peft_type", peft.PeftType), ("task_type", peft.TaskType)):
        if source.get(key) is not None and source[key] not in (names := [kind.value for kind in known]):
            expected = f"Expected {key} of the adapter at peft={folder} to be one of {', '.join(names)}"
            raise UserError(f"{expected}, found {brief(source[key])}: correct adapter_config.json.")
    pattern = source.get("rank_pattern")
    patterned = pattern.values() if isinstance(pattern, dict) else ()
    ranks = [source.get("r"), source.get("num_virtual_tokens"), *patterned]
    rank = max((rank for rank in ranks if fits(rank, int)), default=0)
    weights = Weights(folder, (_ADAPTER,))
    largest = max((size for name in weights.names() for size in weights.shape(name)), default=0)
    # a smaller rank is allowed: it may suit layers for which this file has no weights
    if rank > max(largest, _MOST_RANK):
        expected = f"Expected an adapter whose configuration fits its weights at peft={folder}"
        remedy = "correct adapter_config.json, or copy the adapter again"
        raise UserError(f"{expected}, found a rank of {rank}, and matrices of at most {largest} rows: {remedy}.")
