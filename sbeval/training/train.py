"""`sbeval train RECIPE`: one training run, resumed where it stopped."""

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from transformers import set_seed

from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError
from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.processes.ranks import say
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
    """Trains a model from the recipe, or goes on where an earlier call stopped.

    `out` holds resumable states, the loss curve, and at the end `<recipe.name>/`, the checkpoint; with `replace` what
    else it holds is moved aside. `data_folder` holds token arrays to read instead of the recipe's.

    Returns:
        The checkpoint's folder, or None where time ran out first.

    Raises:
        UserError: data and recipe do not fit, `out` holds another run, or the loss was not finite.
    """
    data = data_folder or Path(recipe.data.folder)
    run = TrainingRun(out, recipe, **options)
    arrays = load_arrays(data)
    training_tokens, validation_tokens = split_validation(arrays.tokens, recipe)
    seen: dict[str, Any] = {"windows": run.windows, "recall_share": recipe.data.recall_share, "seed": recipe.data.seed}
    windows = TrainingWindows(training_tokens, arrays.recall, length_tokens=recipe.length_tokens, **seen)
    if not recipe.data.allow_repeat:
        remedy = "fewer total_tokens, or data.allow_repeat: true in the recipe (--allow-repeat)"
        run.check_epochs(windows, len(training_tokens), remedy=remedy)
    set_seed(recipe.seed)
    model: Any = SbevalForCausalLM(SbevalConfig(**recipe.model))
    tokenizer = load_tokenizer(arrays.tokenizer)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"Expected vocab_size of at least the tokenizer's {len(tokenizer)} in the recipe {recipe.name}, found "
            f"{model.config.vocab_size}; raise it or tokenise the text with fewer"
        )
    checkpoint = out / recipe.name
    identity = {"recipe": recipe.model_dump(mode="json"), "tokens_sha256": arrays.record["tokens_sha256"]}
    identity["inputs"] = arrays_parts(arrays.tokenizer.parent)
    with claimed(out, identity, checkpoint, replace=replace, inputs=[data]) as ended:
        if ended:
            say(f"{checkpoint}: trained before")
            return checkpoint
        if (model := run.train(model, windows)) is None:
            return None

        def validated() -> dict[str, Any]:
            # gathered weights lie in the host's memory
            whole = model.to("cuda" if torch.cuda.is_available() else "cpu")
            return {"validation": validation_loss(whole, validation_tokens, recipe.length_tokens)}

        facts = {"name": recipe.name, "recipe": identity["recipe"]}
        dtype = torch.float32 if recipe.precision == "float32" else torch.bfloat16
        run.finish(
            model, tokenizer, checkpoint, windows, facts=facts, data=arrays.record, dtype=dtype, measured=validated
        )
        say(f"{checkpoint}: trained on {recipe.optimization.steps * recipe.optimization.batch_tokens} tokens")
        return checkpoint


FORWARD_TOKENS = 65536


def split_validation(tokens: Tokens, recipe: TrainRecipe) -> tuple[Tokens, Tokens]:
    """Cuts the joined documents into those to train on and the last `validation_tokens`.

    Raises:
        UserError: the part kept out is shorter than a window, or leaves nothing to train on.
    """
    kept_out = recipe.data.validation_tokens
    if kept_out and not recipe.length_tokens < kept_out < len(tokens) - recipe.length_tokens:
        raise UserError(
            f"Expected validation_tokens beyond a window of {recipe.length_tokens} and within the {len(tokens)} tokens "
            f"there are, found {kept_out}"
        )
    return tokens[: len(tokens) - kept_out], tokens[len(tokens) - kept_out :]


@torch.no_grad()
def validation_loss(model: Any, tokens: Tokens, length_tokens: int) -> dict[str, Any] | None:
    """Returns the mean loss over the disjoint windows of a text, None without one; leaves the model in evaluation mode.

    Returns:
        `nll` in nats per token, `tokens` scored and their `length_tokens`.
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
