"""`sbeval extend CKPT`: continue training at a longer context (Tan et al. 2025, appendix C.1)."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import set_seed

from sbeval.checkpoints.files import Weights, find_folder
from sbeval.checkpoints.load import load_checkpoint
from sbeval.corpora.tokenizers import load_tokenizer, separator_ids, tokenizer_sha256
from sbeval.errors import UserError, first_line
from sbeval.fingerprint.checkpoint import checkpoint_parts, weights_sha256
from sbeval.fingerprint.parts import named
from sbeval.hub_names import is_hub_id
from sbeval.models import SbevalConfig
from sbeval.models.learned_positions import learned_positions
from sbeval.models.rope import held_rope_frequencies
from sbeval.processes.ranks import say
from sbeval.rope_parameters import GLOBAL_LAYERS, parse_rope_scaling, rope_entries
from sbeval.training.arrays import arrays_parts, load_arrays
from sbeval.training.claim import claimed
from sbeval.training.distributed import check_context_parallel
from sbeval.training.losses import document_loss, next_token_loss
from sbeval.training.own_text import OwnText, tokenised_text
from sbeval.training.recipe import Extension
from sbeval.training.run import RunOptions, TrainingRun
from sbeval.training.windows import TrainingWindows


def extend(
    extension: Extension,
    out: Path,
    *,
    replace: bool = False,
    allow_unread: Sequence[str] = (),
    **options: Unpack[RunOptions],
) -> Path | None:
    """Continues training at a longer context, or goes on where an earlier call stopped.

    `out` holds resumable states, the loss curve, and at the end `checkpoint/`; with `replace` what else it holds is
    moved aside. `allow_unread` are glob patterns of the parent's tensors that the model may leave unread.

    Returns:
        The checkpoint's folder, or None where time ran out first. Formats this family reads are written in this
        project's format, other transformers models in their own.

    Raises:
        UserError: checkpoint, data and settings do not fit, `out` holds another run, or the loss was not finite.
    """
    run = TrainingRun(out, extension, **options)
    check_context_parallel(run.context_parallel, extension.context_tokens, extension.documents)
    folder = find_folder(extension.checkpoint)
    loaded = load_checkpoint(folder, dtype="float32", allow_unread=allow_unread)
    if not loaded.extendable:
        raise UserError(
            f"Expected a checkpoint that can be saved again, found the format {loaded.format}, which has no place in "
            "this project's and is read for evaluation only; extend another"
        )
    parent = {
        "name": extension.checkpoint if is_hub_id(extension.checkpoint) else folder.name,
        "sha256": weights_sha256(folder),
        "training_length_tokens": loaded.training_length_tokens,
    }
    tokenizer = load_tokenizer(folder)
    tokens, separator, data = extension_tokens(extension.data, tokenizer)
    if extension.documents == "separate":
        check_documents(tokens, separator, extension.context_tokens)
    windows = TrainingWindows(
        tokens, tokens[:0], length_tokens=extension.context_tokens, windows=run.windows, seed=extension.seed
    )
    if not extension.allow_repeat:
        run.check_epochs(windows, len(tokens), remedy="fewer --steps, a smaller --batch-tokens, or --allow-repeat")
    checkpoint = out / "checkpoint"
    identity = {
        "extension": extension.model_dump(mode="json"),
        "parent": parent,
        "tokens_sha256": data["tokens_sha256"],
        "inputs": checkpoint_parts(str(folder)) | named("data", arrays_parts(extension.data)),
    }
    model: Any = loaded.model.train()
    with contextlib.ExitStack() as stack:
        # before anything is written: what cannot be extended leaves nothing behind
        stack.enter_context(lengthened(model, extension.context_tokens, extension.rope_scaling, parent))
        claim = claimed(out, identity, checkpoint, replace=replace, inputs=[folder, extension.data])
        if stack.enter_context(claim):
            say(f"{checkpoint}: extended before")
            return checkpoint
        set_seed(extension.seed)
        apart = functools.partial(document_loss, separator=separator)
        if extension.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model = run.train(model, windows, next_token_loss if extension.documents == "joined" else apart)
        if model is None:
            return None
        facts = {"extension": identity["extension"], "parent": parent | {"format": loaded.format}}
        dtype = torch.float32 if extension.precision == "float32" else Weights(folder).dtype()
        run.finish(model, tokenizer, checkpoint, windows, facts=facts, data=data, dtype=dtype, parent=folder)
        say(f"{checkpoint}: extended to {extension.context_tokens} tokens")
        return checkpoint


@contextlib.contextmanager
def lengthened(model: Any, context_tokens: int, rope_scaling: str | None, parent: Mapping[str, Any]) -> Iterator[None]:
    """Writes the extension into the configuration, the scaling with the length it started from included.

    One set of RoPE frequencies, worked out from the parent's, is held for the whole run: a dynamic kind would follow
    each segment's length.

    The configuration is changed in place and stays so. `parent` is what the checkpoint says of the one it came from;
    its `training_length_tokens` may be None.

    Raises:
        UserError: the context is no longer than the parent's, the model has no positions beyond, or the scaling does
            not fit it.
    """
    config = model.config
    original = parent["training_length_tokens"]
    positions = learned_positions(model)
    if positions is not None and context_tokens > positions:
        raise UserError(
            f"Expected a model with positions for {context_tokens} tokens, found one that has learned {positions} of "
            "them and has none beyond; extend a model with rotary or without learned positions"
        )
    if original is not None and context_tokens <= original:
        raise UserError(f"Expected --context beyond the training length of {original} tokens, found {context_tokens}")
    scaling = None if rope_scaling is None else parse_rope_scaling(rope_scaling)
    held = held_rope_frequencies(model, context_tokens, scaling, original_length_tokens=original)
    if scaling is not None:
        own = getattr(config, "rope_parameters", None)
        entries = rope_entries(own)
        rope = entries.get(GLOBAL_LAYERS, entries.get("", {}))
        if "rope_theta" not in rope:
            found = f"rotary embeddings of {', '.join(entries)} alone" if entries else "no rotary embeddings"
            raise UserError(f"Expected a RoPE model for --rope-scaling, found one with {found}; remove it")
        unscaled = rope.get("original_max_position_embeddings", original or config.max_position_embeddings)
        base = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        scaled = base | scaling | {"original_max_position_embeddings": unscaled}
    with held:
        config.max_position_embeddings = context_tokens
        config.extended_from = dict(parent)
        if isinstance(config, SbevalConfig):
            config.training_length_tokens = context_tokens
        if isinstance(config, SbevalConfig) and scaling is not None:
            config.set_rope_parameters(scaled)
        elif scaling is not None:
            config.rope_parameters = {**(own or {}), GLOBAL_LAYERS: scaled} if GLOBAL_LAYERS in entries else scaled
        try:
            config.validate()  # as it will be when the first state is saved
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"Expected a configuration that can be saved with the context of {context_tokens} tokens, found: "
                f"{first_line(error)}; change --rope-scaling"
            ) from error
        yield


def extension_tokens(source: Path, tokenizer: Any) -> tuple[NDArray[Any], int, dict[str, Any]]:
    """Reads the text to extend on: token arrays (`arrays`), a file or folder of text, or a hub data set.

    Returns:
        [tokens] joined documents, each followed by the separator; the separator's id; where the text comes from.

    Raises:
        UserError: nothing is there, or the arrays were made with another tokenizer than the checkpoint's.
    """
    (separator,) = separator_ids(tokenizer, None)
    if (source / "tokens.npy").is_file():
        arrays = load_arrays(source)
        ours = tokenizer_sha256(tokenizer)
        theirs = tokenizer_sha256(load_tokenizer(arrays.tokenizer))
        if theirs != ours:
            raise UserError(
                f"Expected token arrays made with the checkpoint's tokenizer ({ours[:12]}), found {theirs[:12]} in "
                f"{source}; tokenise the text again or give the text itself"
            )
    else:
        arrays = load_arrays(tokenised_text(OwnText(source=str(source)), tokenizer, holding_out=False))
    return arrays.tokens, separator, arrays.record


def check_documents(tokens: NDArray[Any], separator: int, context_tokens: int) -> None:
    """Refuses joined documents of which none fills a context."""
    ends = np.flatnonzero(np.asarray(tokens) == separator)
    longest = int(np.diff(ends, prepend=-1).max()) - 1 if len(ends) else len(tokens)
    if longest < context_tokens:
        raise UserError(
            f"Expected at least one document of {context_tokens} tokens, found the longest has {longest}; "
            "give longer documents, a shorter --context, or --documents joined"
        )
