"""Checks whether a tokenizer belongs to the model, and finds the tokens that it adds to a text, such as BOS."""

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from sbeval.checkpoints.facts import text_config
from sbeval.corpora import adds_bos, tokenizer_sha256
from sbeval.corpora.store import tokenizer_behind
from sbeval.corpora.tokenizers import added_tokens, load_tokenizer
from sbeval.errors import UserError, brief
from sbeval.foreign_files import read_json_object

logger = logging.getLogger(__name__)
# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
format_logger = logging.getLogger("lm_eval.sbeval.checkpoints")

_LEAST_SHARE_OF_EMBEDDINGS = 0.9  # a smaller vocabulary is suspicious: models pad the matrix by less than a tenth
_TRAINED_WITH_BOS = ("gemma", "recurrent_gemma")  # these need BOS even if the tokenizer's settings say otherwise
_THINKING_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>", "</thought>")


def fit_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Checks that the model has an embedding for every token, and sets a padding token that the model knows.

    Raises:
        UserError: ordinary tokens have ids beyond the model's embeddings, or `model_max_length` is not a number.
    """
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or isinstance(longest, bool) or not longest > 0:
        expected = "Expected model_max_length of the tokenizer to be a number above 0"
        raise UserError(f"{expected}, found {brief(longest)}: correct it in tokenizer_config.json.")
    entries = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    beyond = sorted(token for token, index in added.items() if index >= entries and token != tokenizer.pad_token)
    if beyond:  # only added tokens are left here, which ordinary text does not contain
        logger.warning(
            "the model has no embedding for these tokens of its tokenizer: %s; a text that holds one is refused",
            ", ".join(beyond),
        )
    highest = max((index for token, index in vocabulary.items() if token not in added), default=0)
    if highest >= entries:
        raise UserError(
            f"Expected a tokenizer whose ids fit the model's {entries} embeddings, found ids up to {highest}: pass the "
            "tokenizer this model was trained with as tokenizer=... in --model_args."
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= entries:
        # any token that the model knows can be the padding: it is masked, and answers are cut at their end token
        end = tokenizer.eos_token_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end if end is not None and end < entries else 0)


def is_as_saved(arguments: Mapping[str, Any]) -> bool:
    """Whether `hf` loads the tokenizer of a checkpoint's own folder with these arguments, with its saved settings."""
    saved = ("add_bos_token", "gguf_file", "subfolder", "tokenizer")
    return (
        all(arguments.get(name) in (None, "") for name in saved)
        and arguments.get("revision") in (None, "", "main")
        and arguments.get("use_fast_tokenizer") is not False
        and not arguments.get("trust_remote_code")
    )


def check_tokenizer(
    model: Any, tokenizer: Any, *, folder: Path | None, saved_config: Mapping[str, Any], as_saved: bool
) -> None:
    """Warns of signs that a loaded model was trained with another tokenizer.

    Args:
        model: the loaded model.
        tokenizer: the loaded tokenizer.
        folder: the checkpoint's folder, None for a model in memory.
        saved_config: the contents of its `config.json`, empty if there is none.
        as_saved: whether the tokenizer is the checkpoint's own with its saved settings, see `is_as_saved`.

    Raises:
        UserError: the training record in the folder names another tokenizer than the one in the folder.
    """
    config = text_config(model.config)
    entries, vocabulary_size = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if vocabulary_size < _LEAST_SHARE_OF_EMBEDDINGS * entries:
        logger.warning(
            "the model has %d embeddings and its tokenizer only %d tokens: check that the tokenizer is the model's, "
            "and name the right one with tokenizer=... in --model_args",
            *(entries, vocabulary_size),
        )
    # read from config.json: the default of a configuration class says nothing about this tokenizer
    eos_ids, end = saved_config.get("eos_token_id"), tokenizer.eos_token_id
    eos_ids = [eos_ids] if isinstance(eos_ids, int) else eos_ids
    if eos_ids and end is not None and end not in eos_ids and max(eos_ids) < entries:
        logger.warning(
            "eos_token_id is %s in the model's config.json and %d in its tokenizer: check that they belong together",
            *(" or ".join(map(str, eos_ids)), end),
        )
    if not adds_bos(tokenizer) and (
        str(config.model_type).startswith(_TRAINED_WITH_BOS) or _asks_for_bos(tokenizer.name_or_path, as_saved=as_saved)
    ):
        logger.warning(
            "this model was trained with a BOS token before every text, and its tokenizer adds none: pass "
            "add_bos_token=True in --model_args, unless the texts begin with it",
        )
    if folder is not None:
        _check_recorded_tokenizer(folder, tokenizer if as_saved else None)


def warn_of_other_tokens(tokenizer: Any, keys: Iterable[str]) -> None:
    """Warns if the text of a task was tokenized with another tokenizer than the model's.

    `keys` are the keys of the task's requests, which name ranges of tokens in a tokenized text.
    """
    model_hash = tokenizer_sha256(tokenizer)
    task_hashes = {tokenizer_behind(key) for key in keys}
    if other_hashes := [task_hash for task_hash in task_hashes if not model_hash.startswith(task_hash)]:
        logger.warning(
            "the task's text was tokenized with another tokenizer (%s) than the model's (%s): remove tokenizer from "
            "--metadata, unless both give the same tokens",
            *(other_hashes[0], model_hash[: len(other_hashes[0])]),
        )


def prefix_token_id(tokenizer: Any, passed: int | None) -> int:
    """Returns the token id to put before the first token of a text: `passed` if not None, else BOS or EOS.

    Raises:
        UserError: `passed` is None, and the tokenizer has neither BOS nor EOS.
    """
    candidates: tuple[int | None, ...] = (passed, tokenizer.bos_token_id, tokenizer.eos_token_id)
    for token in candidates:
        if token is not None:
            return token
    raise UserError(
        "The tokenizer has neither a BOS nor an EOS token to put before a text's first token: pass prefix_token_id=... "
        "in --model_args."
    )


def thinking_end(tokenizer: Any, named: str | int | None) -> str | int:
    """Returns the marker that ends a model's thinking, as a token id if it is a special token, else as text.

    Special tokens are compared by id because decoded answers omit them.

    Args:
        tokenizer: the model's tokenizer.
        named: the text or token id that the user passed, None to find it in the chat template or the vocabulary.

    Raises:
        UserError: no marker was passed, and the tokenizer knows none of the usual markers.
    """
    end_of_thinking = named or _usual_thinking_end(tokenizer)
    text = tokenizer.decode([end_of_thinking]) if isinstance(end_of_thinking, int) else str(end_of_thinking)
    added = tokenizer.added_tokens_decoder.items()
    return next((index for index, token in added if token.special and token.content == text), end_of_thinking)


def added_to_texts(opened: Any) -> dict[str, Any] | None:
    """Describes the tokens that a tokenizer adds before and after a text, and which of them this run keeps.

    `opened` is an `Opened`. Returns the value of `ModelRecord.added_tokens`, None if the tokenizer adds no tokens.
    """
    added = added_tokens(opened.tokenizer)
    if opened.add_bos_token is False or not any(added):
        return None
    names = added.to_json(opened.tokenizer)
    prefix, suffix = (" ".join(names[name]) for name in ("prefix", "suffix"))
    places = [f"{text} {place} every text" for text, place in ((prefix, "before"), (suffix, "behind")) if text]
    facts = [f"the tokenizer adds {' and '.join(places)}"]
    if not opened.causal:
        facts.append("an encoder-decoder model reads them as in hf")
        return {**names, "sentence": "; ".join(facts)}
    if suffix and opened.options.template_suffix == "keep":
        facts.append(f"as in hf, {suffix} stands between a prompt and its answer (template_suffix=keep)")
    elif suffix:
        facts.append(
            f"{suffix} is dropped behind prompts and contexts (template_suffix=keep reads it there, as hf does)"
        )
    scored = " and ".join(filter(None, (prefix, suffix)))
    facts.append(f"loglikelihood_rolling scores {scored} with every text, as lm-eval does")
    return {**names, "sentence": "; ".join(facts)}


def log_added_tokens(added: Mapping[str, Any]) -> None:
    """Logs which tokens the tokenizer adds to a text, as a warning if it adds some after the text."""
    level = logging.WARNING if added["suffix"] else logging.INFO
    format_logger.log(level, "%s", added["sentence"])


def _usual_thinking_end(tokenizer: Any) -> str:
    vocabulary, templates = tokenizer.get_vocab(), str(tokenizer.chat_template)
    for end in _THINKING_ENDS:
        if end in vocabulary or end in templates:
            return end
    raise UserError(
        f"thinking_tokens needs the text that ends the model's thinking, but none of {', '.join(_THINKING_ENDS)} is in "
        "its chat template or its tokenizer: name the text with think_end_token=... in --model_args."
    )


def _asks_for_bos(name: str, *, as_saved: bool) -> bool:
    """Whether a saved tokenizer adds BOS to a text, although the loaded one adds none.

    `add_bos_token` in its files decides, whatever its class does. Without this setting the saved tokenizer is loaded,
    unless the loaded one is `as_saved`.
    """
    with contextlib.suppress(OSError, ValueError):
        setting = get_tokenizer_config(name, local_files_only=True).get("add_bos_token")
        if setting is not None:
            return setting is True
        return not as_saved and adds_bos(load_tokenizer(name, local_files_only=True))
    return False


def _check_recorded_tokenizer(folder: Path, loaded: Any) -> None:
    """Compares the hash of the tokenizer in a checkpoint's folder with the hash that `sbeval train` recorded.

    Versions of the package tokenizers may write the same tokenizer differently, so hashes are compared only if the
    versions are equal. The tokenizer in the folder is loaded only if it is not `loaded` yet, or if a padding token that
    was added to `loaded` changed its hash.

    Raises:
        UserError: the hashes differ.
    """
    try:
        record = read_json_object(folder / "training_record.json", "the record of a training")
        recorded, version = record["tokenizer_sha256"], record["versions"]["tokenizers"]
    except (UserError, KeyError, TypeError):
        return
    if version != importlib.metadata.version("tokenizers"):
        return
    if loaded is not None and tokenizer_sha256(loaded) == recorded:
        return
    if recorded != (present := tokenizer_sha256(load_tokenizer(folder))):
        raise UserError(
            f"Expected the tokenizer that {folder} was trained with ({str(recorded)[:12]} in training_record.json), "
            f"found another ({present[:12]}): put the checkpoint's own tokenizer files back."
        )
