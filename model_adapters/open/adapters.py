"""PEFT adapters: an adapter is refused if weights are missing, or if the model does not read some of them."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.unread import Report, allowed_among
from sbeval.errors import UserError, first_line, shown
from sbeval.foreign_files import fits, read_json_object
from sbeval.model_adapters.batching import out_of_memory

_ADAPTER = "adapter_model.safetensors"
_MOST_RANK = 2**16


@contextlib.contextmanager
def whole_adapter(
    name: str | None, *, allow_unread: Sequence[str] | None = None, report: Report | None = None
) -> Iterator[None]:
    """Refuses, while `hf` loads a PEFT adapter, one that lacks weights or holds weights that the model does not read.

    peft only warns of missing weights, which stay random, and says nothing about unread ones.

    Args:
        name: the adapter's folder or hub id, None without an adapter.
        allow_unread: glob patterns of the names that may stay unread.
        report: called with the unread weights.

    Raises:
        UserError: naming the adapter, and the weights that are missing or unread.
    """
    if name is None:
        yield
        return
    if (Path(name) / _ADAPTER).is_file():
        _check_adapter(Path(name))
    import peft  # seconds, for those who have an adapter

    load = peft.PeftModel.load_adapter

    @functools.wraps(load)
    def load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(model, *args, **kwargs)
        if names := set(loaded.unexpected_keys):  # those of prompts, which peft reads apart, among them
            names -= peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        said = {"reader": "the model with its adapter", "place": f"peft={name}"}
        mend = "target_modules and the like in adapter_config.json, or name the model that the adapter was trained on"
        unread = allowed_among(names, allow_unread, mend=mend, **said)
        if report is not None:
            report(unread)
        return loaded

    read = peft.PeftModel.from_pretrained

    @functools.wraps(read)
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except (UserError, UserWarning):
            raise
        except Exception as error:  # as in `in_one_sentence`
            if out_of_memory(error):
                raise
            raise UserError(
                f"Expected a PEFT adapter for this model at peft={name}, but it cannot be loaded "
                f"({first_line(error)}): check that it was saved completely, and that it belongs to this model."
            ) from error

    with contextlib.ExitStack() as stack:
        for name_of_method, before, during in (
            ("load_adapter", load, load_adapter),
            ("from_pretrained", read, from_pretrained),
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
    """Refuses an adapter of an unknown type, or with a rank far above the size of every matrix in its file."""
    import peft  # seconds, for those who have an adapter

    source = read_json_object(folder / "adapter_config.json", "the configuration of an adapter")
    for key, known in (("peft_type", peft.PeftType), ("task_type", peft.TaskType)):
        if source.get(key) is not None and source[key] not in (names := [kind.value for kind in known]):
            expected = f"Expected {key} of the adapter at peft={folder} to be one of {', '.join(names)}"
            raise UserError(f"{expected}, found {shown(source[key])}: correct adapter_config.json.")
    pattern = source.get("rank_pattern")
    patterned = pattern.values() if isinstance(pattern, dict) else ()
    ranks = [source.get("r"), source.get("num_virtual_tokens"), *patterned]
    rank = max((rank for rank in ranks if fits(rank, int)), default=0)
    weights = Weights(folder, (_ADAPTER,))
    largest = max((size for name in weights.names() for size in weights.shape(name)), default=0)
    if rank > max(largest, _MOST_RANK):  # below it, a rank may be that of layers which no weight stands for
        expected = f"Expected an adapter whose configuration fits its weights at peft={folder}"
        remedy = "correct adapter_config.json, or copy the adapter again"
        raise UserError(f"{expected}, found a rank of {rank}, and matrices of at most {largest} rows: {remedy}.")
