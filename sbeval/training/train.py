"""`sbeval train RECIPE`: trains a model from scratch, or resumes a run that stopped."""

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from transformers import set_seed

from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError
from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.processes.ranks import print_on_rank_0
from sbeval.training.arrays import arrays_parts, load_arrays
from sbeval.training.claim import claimed
from sbeval.training.losses import next_token_loss
from sbeval.training.recipe import TrainRecipe
from sbeval.training.run import RunOptions, TrainingRun
from sbeval.training.tokenizer import Tokens
from sbeval.training.windows import TrainingWindows


def train(
    recipe: TrainRecipe,
    out: Path,
    *,
    data_folder: Path | None = None,
    replace: bool = False,
    **options: Unpack[RunOptions],
) -> Path | None:
    """Trains a model from a recipe, or resumes an earlier call that stopped.

    Args:
        recipe: settings of the run.
        out: output folder: resumable states, the loss curve, and at the end the checkpoint, `<recipe.name>/`.
        data_folder: folder of token arrays to read instead of the one that the recipe names.
        replace: move anything else that `out` holds aside.
        **options: fields of `TrainingRun`.

    Returns:
        The checkpoint's folder, or None if the time limit ended the run first.

    Raises:
        UserError: data and recipe do not fit, `out` holds another run, or the loss was not finite.
    """
    data = data_folder or Path(recipe.data.folder)
    run = TrainingRun(out, recipe, **options)
    arrays = load_arrays(data)
    training_tokens, validation_tokens = split_validation(arrays.tokens, recipe)
    windows = TrainingWindows(
        training_tokens,
        arrays.recall,
        length_tokens=recipe.length_tokens,
        windows=run.windows,
        recall_share=recipe.data.recall_share,
        seed=recipe.data.seed,
    )
    if not recipe.data.allow_repeat:
        remedy = "fewer total_tokens, or data.allow_repeat: true in the recipe (--allow-repeat)"
        run.check_epochs(windows, len(training_tokens), remedy=remedy)
    set_seed(recipe.seed)
    model: Any = SbevalForCausalLM(SbevalConfig(**recipe.model))
    tokenizer = load_tokenizer(arrays.tokenizer)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"The tokenizer has {len(tokenizer)} entries, but vocab_size in the recipe {recipe.name} is "
            f"{model.config.vocab_size}; raise it, or tokenise the text with a smaller tokenizer"
        )
    checkpoint = out / recipe.name
    identity = {"recipe": recipe.model_dump(mode="json"), "tokens_sha256": arrays.record["tokens_sha256"]}
    identity["inputs"] = arrays_parts(arrays.tokenizer.parent)
    with claimed(out, identity, checkpoint, replace=replace, inputs=[data]) as has_finished:
        if has_finished:
            print_on_rank_0(f"{checkpoint}: already trained")
            return checkpoint
        model = run.train(model, windows)
        if model is None:
            return None

        def measure_validation() -> dict[str, Any]:
            # with FSDP the gathered weights are in host memory
            on_device = model.to("cuda" if torch.cuda.is_available() else "cpu")
            return {"validation": validation_loss(on_device, validation_tokens, recipe.length_tokens)}

        facts = {"name": recipe.name, "recipe": identity["recipe"]}
        dtype = torch.float32 if recipe.precision == "float32" else torch.bfloat16
        run.finish(
            model,
            tokenizer,
            checkpoint,
            windows,
            facts=facts,
            data=arrays.record,
            dtype=dtype,
            measured=measure_validation,
        )
        print_on_rank_0(
            f"{checkpoint}: trained on {recipe.optimization.steps * recipe.optimization.batch_tokens} tokens"
        )
        return checkpoint


FORWARD_TOKENS = 65536


def split_validation(tokens: Tokens, recipe: TrainRecipe) -> tuple[Tokens, Tokens]:
    """Splits the joined documents into training tokens and validation tokens, the last `validation_tokens` of them.

    Raises:
        UserError: either part is shorter than a window.
    """
    validation_tokens = recipe.data.validation_tokens
    longest = len(tokens) - recipe.length_tokens
    if validation_tokens and not recipe.length_tokens < validation_tokens < longest:
        raise UserError(
            f"Expected data.validation_tokens between one window ({recipe.length_tokens}) and the text's {len(tokens)} "
            f"tokens less one window, found {validation_tokens}; change it or give more text"
        )
    return tokens[: len(tokens) - validation_tokens], tokens[len(tokens) - validation_tokens :]


@torch.no_grad()
def validation_loss(model: Any, tokens: Tokens, length_tokens: int) -> dict[str, Any] | None:
    """Computes the mean loss over disjoint windows of a text, and leaves the model in evaluation mode.

    Returns:
        `nll` in nats per token, the number of scored `tokens`, and the windows' `length_tokens`; None without tokens.
    """
    if not len(tokens):
        return None
    model.eval()
    starts = range(0, len(tokens) - length_tokens, length_tokens)
    device = next(model.parameters()).device
    rows = max(1, FORWARD_TOKENS // length_tokens)
    total = 0.0
    for first in range(0, len(starts), rows):
        batch = np.stack([tokens[start : start + length_tokens + 1] for start in starts[first : first + rows]])
        loss = next_token_loss(model, torch.from_numpy(batch.astype(np.int64)).to(device))
        total += loss.double().item() * len(batch)
    return {"nll": total / len(starts), "tokens": len(starts) * length_tokens, "length_tokens": length_tokens}
