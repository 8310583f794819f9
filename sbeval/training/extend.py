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

from sbeval.checkpoints.facts import text_config
from sbeval.checkpoints.files import Weights, find_folder
from sbeval.checkpoints.load import load_checkpoint
from sbeval.corpora.tokenizers import load_tokenizer, separator_ids, tokenizer_sha256
from sbeval.errors import UserError, first_line
from sbeval.fingerprint.checkpoint import checkpoint_parts, weights_sha256
from sbeval.fingerprint.parts import named
from sbeval.hub_names import is_hub_id
from sbeval.models import SbevalConfig
from sbeval.models.learned_positions import learned_positions
from sbeval.models.rope import setting_rope_frequencies
from sbeval.processes.ranks import print_on_rank_0
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
    """Continues training at a longer context, or resumes an earlier call that stopped.

    Args:
        extension: settings of the run.
        out: output folder: resumable states, the loss curve, and at the end `checkpoint/`.
        replace: move anything else that `out` holds aside.
        allow_unread: glob patterns of names of tensors that the parent checkpoint may hold although the model does not
            use them.
        **options: fields of `TrainingRun`.

    Returns:
        The checkpoint's folder, or None if the time limit ended the run first. Models of this project's classes are
        saved in this project's format, other transformers models in the format of transformers.

    Raises:
        UserError: checkpoint, data and settings do not fit, `out` holds another run, or the loss was not finite.
    """
    run = TrainingRun(out, extension, **options)
    check_context_parallel(run.context_parallel, extension.context_tokens, extension.documents)
    folder = find_folder(extension.checkpoint)
    loaded = load_checkpoint(folder, dtype="float32", allow_unread=allow_unread)
    if not loaded.extendable:
        raise UserError(
            f"Checkpoints of the format {loaded.format} can only be evaluated: this project has no format to save them "
            "in; extend another checkpoint"
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
        # this comes before the folder is claimed, so that a model that cannot be extended leaves no files
        stack.enter_context(longer_context(model, extension.context_tokens, extension.rope_scaling, parent))
        claim = claimed(out, identity, checkpoint, replace=replace, inputs=[folder, extension.data])
        if stack.enter_context(claim):
            print_on_rank_0(f"{checkpoint}: already extended")
            return checkpoint
        set_seed(extension.seed)
        separate_loss = functools.partial(document_loss, separator=separator)
        if extension.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model = run.train(model, windows, next_token_loss if extension.documents == "joined" else separate_loss)
        if model is None:
            return None
        facts = {"extension": identity["extension"], "parent": parent | {"format": loaded.format}}
        dtype = torch.float32 if extension.precision == "float32" else Weights(folder).dtype()
        run.finish(model, tokenizer, checkpoint, windows, facts=facts, data=data, dtype=dtype, parent=folder)
        print_on_rank_0(f"{checkpoint}: extended to {extension.context_tokens} tokens")
        return checkpoint


@contextlib.contextmanager
def longer_context(
    model: Any, context_tokens: int, rope_scaling: str | None, parent: Mapping[str, Any]
) -> Iterator[None]:
    """Prepares a model for training at a longer context: changes its configuration and fixes its RoPE frequencies.

    RoPE frequencies are computed once for `context_tokens` and stay fixed inside the `with` block, because dynamic
    scaling would otherwise choose other frequencies for the length of each segment. `model.config` stays changed after
    the block.

    Args:
        model: the parent model.
        context_tokens: new context length.
        rope_scaling: scaling to train with, such as "dynamic:4"; None keeps the parent's.
        parent: name, hash and `training_length_tokens` (may be None) of the parent; saved as `extended_from` of the
            configuration, or of its text configuration in a multimodal model.

    Raises:
        UserError: the context is not longer than the parent's, the model has too few learned positions, or the scaling
            does not fit the model.
    """
    config = text_config(model.config)
    original = parent["training_length_tokens"]
    positions = learned_positions(model)
    if positions is not None and context_tokens > positions:
        raise UserError(
            f"The model has {positions} learned position embeddings and cannot read {context_tokens} tokens; extend a "
            "model with rotary embeddings or without position embeddings"
        )
    if original is not None and context_tokens <= original:
        raise UserError(
            f"Expected --context to exceed the training length of {original} tokens, found {context_tokens}; raise it"
        )
    scaling = None if rope_scaling is None else parse_rope_scaling(rope_scaling)
    fixed_frequencies = setting_rope_frequencies(model, context_tokens, scaling, original_length_tokens=original)
    if scaling is not None:
        original_parameters = getattr(config, "rope_parameters", None)
        entries = rope_entries(original_parameters)
        rope = entries.get(GLOBAL_LAYERS, entries.get("", {}))
        if "rope_theta" not in rope:
            rotary = f"has rotary embeddings only in {', '.join(entries)}" if entries else "has no rotary embeddings"
            raise UserError(f"--rope-scaling does not apply: the model {rotary}; remove it")
        unscaled = rope.get("original_max_position_embeddings", original or config.max_position_embeddings)
        base = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        scaled = base | scaling | {"original_max_position_embeddings": unscaled}
    with fixed_frequencies:
        config.max_position_embeddings = context_tokens
        config.extended_from = dict(parent)
        if isinstance(config, SbevalConfig):
            config.training_length_tokens = context_tokens
        if isinstance(config, SbevalConfig) and scaling is not None:
            config.set_rope_parameters(scaled)
        elif scaling is not None:
            config.rope_parameters = (
                {**(original_parameters or {}), GLOBAL_LAYERS: scaled} if GLOBAL_LAYERS in entries else scaled
            )
        try:
            config.validate()  # otherwise transformers would report an error only when it saves the first state
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"transformers refuses the model's configuration at a context of {context_tokens} tokens: "
                f"{first_line(error)}; change --rope-scaling"
            ) from error
        yield


def extension_tokens(source: Path, tokenizer: Any) -> tuple[NDArray[Any], int, dict[str, Any]]:
    """Loads the training tokens from token arrays, a file or folder of text, or a hub data set.

    Returns:
        All documents, each followed by the separator, as token ids [tokens]; the separator's token id; the record of
        the source.

    Raises:
        UserError: there is no text, or the token arrays were made with another tokenizer than the checkpoint's.
    """
    (separator,) = separator_ids(tokenizer, None)
    if (source / "tokens.npy").is_file():
        arrays = load_arrays(source)
        arrays_sha256 = tokenizer_sha256(load_tokenizer(arrays.tokenizer))
        checkpoint_sha256 = tokenizer_sha256(tokenizer)
        if arrays_sha256 != checkpoint_sha256:
            raise UserError(
                f"Expected token arrays made with the checkpoint's tokenizer ({checkpoint_sha256[:12]}), found "
                f"{arrays_sha256[:12]} in {source}; tokenise the text again or give the text itself"
            )
    else:
        arrays = load_arrays(tokenised_text(OwnText(source=str(source)), tokenizer, holding_out=False))
    return arrays.tokens, separator, arrays.record


def check_documents(tokens: NDArray[Any], separator: int, context_tokens: int) -> None:
    """Checks that at least one document is as long as the context."""
    ends = np.flatnonzero(np.asarray(tokens) == separator)
    longest = int(np.diff(ends, prepend=-1).max()) - 1 if len(ends) else len(tokens)
    if longest < context_tokens:
        raise UserError(
            f"No document has {context_tokens} tokens: the longest has {longest}; "
            "give longer documents, a shorter --context, or --documents joined"
        )
