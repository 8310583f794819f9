"""Loading: errors in one sentence, tokenizers that fit, and chat templates, code held to some memory and length."""

import contextlib
import functools
import importlib.metadata
import logging
import os
import re
import resource
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from sbeval.checkpoints.facts import KvExpand, text_config
from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.registry import CheckpointFormat
from sbeval.checkpoints.unread import Report, allowed_among
from sbeval.corpora import adds_bos, tokenizer_sha256
from sbeval.corpora.store import tokenizer_behind
from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError, first_line, panics_as_errors, raised_here, shown
from sbeval.fingerprint.parts import installed_version, untested
from sbeval.foreign_files import fits, read_json_object
from sbeval.model_adapters.batching import out_of_memory
from sbeval.model_adapters.prepare.replacing import held
from sbeval.scoring.non_finite import non_finite_weights

logger = logging.getLogger(__name__)
# below lm-eval's own logger, whose level is INFO: elsewhere the line would not be seen
format_logger = logging.getLogger("lm_eval.sbeval.checkpoints")

OLDEST_TRANSFORMERS_OF_PLANS = (5, 21)
"""Older releases keep whole matrices that a plan should split, and fused modules do not give a plan's logits there."""

_ADAPTER = "adapter_model.safetensors"
_MOST_RANK = 2**16
_LEAST_SHARE_OF_EMBEDDINGS = 0.9  # no model has more than the other tenth to spare
_TRAINED_WITH_BOS = ("gemma", "recurrent_gemma")  # whatever their tokenizer's settings say
# arguments of hf's `_create_model` that are settled when the checkpoint is loaded, or that work on any loaded model
_SETTLED = {"revision", "dtype", "trust_remote_code", "gpus", "peft"}
_OF_PARALLELIZE = {"max_memory_per_gpu", "max_cpu_memory", "offload_folder"}  # they mean nothing without it
_SAVED_ATTENTION = "_attn_implementation"  # of config.json
_QUANTISING = ("load_in_4bit", "load_in_8bit", "quantization_config", "autogptq", "gptqmodel")
_MOST_TEMPLATE_BYTES, _TEMPLATE_MEMORY_BYTES = 2**25, 2**30
_limiting = threading.RLock()  # the limit is the whole process's


@contextlib.contextmanager
def in_one_sentence(
    name: Any,
    what: str,
    *,
    argument: str = "pretrained",
    given: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Turns what transformers raises for `what` it cannot load, such as "a tokenizer", into one sentence.

    `argument` of `--model_args` names it; `given` are the other arguments and `config` are the contents of config.json,
    which may both ask for what fails.

    Raises:
        UserError: `name` is a string and loading it failed, or an argument is unknown.
    """
    try:
        with panics_as_errors():
            yield
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers answer a broken file with any class, bare Exception too
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
    """Returns what is wrong where something does not load, and what to do about it."""
    said, place = first_line(error), Path(name)
    folder, gguf_file = place / str(given.get("subfolder") or ""), given.get("gguf_file")
    if re.search("attn_implementation|attention implementation|Flash ?Attention", str(error)):
        return f"it has no attention of the kind asked for ({said})", _other_attention(given, config)
    if isinstance(error, ImportError):
        return f"a package is missing ({said})", f"install the package{_quantisation_instead(given, config)}"
    if "does not recognize this architecture" in str(error):
        return (
            f"transformers does not know its model type ({said})",
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
            f"{file} does not hold one that transformers can read ({said})",
            "copy the file again or take another; if transformers does not know its architecture, load the checkpoint "
            "that it was made of",
        )
    if place.is_dir():
        if not folder.is_dir():
            return f"there is no folder {folder}", "correct subfolder in --model_args"
        complete = "check that the checkpoint was saved completely with save_pretrained"
        other = ", or name another with tokenizer=..." if what == "a tokenizer" and argument == "pretrained" else ""
        return f"the folder {folder} does not hold one that can be read ({said})", complete + other
    if place.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return f"there is no such folder: {name}", "correct the path"
    revision = " or the revision" if given.get("revision") not in (None, "main") else ""
    return (
        f"{name} is no folder here, and cannot be loaded from the hub ({said})",
        f"correct the name{revision}, or check the network and the access rights",
    )


def _other_attention(given: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns how to ask for another attention, wherever the one that fails is asked for."""
    if any(_SAVED_ATTENTION in part for part in _parts(config)):
        return f"take {_SAVED_ATTENTION} out of config.json, which counts before attn_implementation in --model_args"
    if given.get("attn_implementation") is not None:
        return "leave attn_implementation out of --model_args, or name another"
    if any("attn_implementation" in part for part in _parts(config)):
        return "pass attn_implementation=sdpa or eager in --model_args, which counts before that of config.json"
    return "pass attn_implementation=sdpa or eager in --model_args"


def _quantisation_instead(given: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns what else to do about a missing package where something asks for weights that are quantised."""
    if asked := [name for name in _QUANTISING if given.get(name)]:
        return f", or leave {', '.join(asked)} out of --model_args"
    if any("quantization_config" in part for part in _parts(config)):
        return ", or take a checkpoint whose weights are not quantised"
    return ""


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(part for part in config.values() if isinstance(part, Mapping))]


@contextlib.contextmanager
def whole_adapter(
    name: str | None, *, allow_unread: Sequence[str] | None = None, report: Report | None = None
) -> Iterator[None]:
    """Refuses a PEFT adapter that lacks weights, or holds some that the model does not read.

    peft warns of missing weights, which stay random, and says nothing of others. `allow_unread` are glob patterns of
    the names that may stay unread; `report` takes them.

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
    """Refuses an adapter of an unknown kind, or of huge matrices, with more rows or columns than any its file holds."""
    import peft  # seconds, for those who have an adapter

    source = read_json_object(folder / "adapter_config.json", "the configuration of an adapter")
    for key, known in (("peft_type", peft.PeftType), ("task_type", peft.TaskType)):
        if source.get(key) is not None and source[key] not in (names := [kind.value for kind in known]):
            expected = f"Expected {key} of the adapter at peft={folder} to be one of {', '.join(names)}"
            raise UserError(f"{expected}, found {shown(source[key])}: correct adapter_config.json.")
    pattern = source.get("rank_pattern")
    patterned = pattern.values() if isinstance(pattern, dict) else ()
    ranks = [source.get("r"), source.get("num_virtual_tokens"), *patterned]
    asked = max((rank for rank in ranks if fits(rank, int)), default=0)
    weights = Weights(folder, (_ADAPTER,))
    held = max((size for name in weights.names() for size in weights.shape(name)), default=0)
    if asked > max(held, _MOST_RANK):  # below it, a rank may be that of layers which no weight stands for
        expected = f"Expected an adapter whose configuration fits its weights at peft={folder}"
        remedy = "correct adapter_config.json, or copy the adapter again"
        raise UserError(f"{expected}, found a rank of {asked}, and matrices of at most {held} rows: {remedy}.")


def tied_as_it_is(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `model.tie_weights()` does nothing.

    lm-eval calls it for every model. Loading has tied weights already. It leaves an output matrix alone that differs
    from the embeddings, whatever `tie_word_embeddings` says, and an adapter may have trained one of the two.
    """
    return held([(model, {"tie_weights": lambda *_, **__: None})])


def fit_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Checks that the model knows every token id, and gives the tokenizer a padding token that it knows.

    Raises:
        UserError: the tokenizer's ordinary tokens have ids beyond the model's embeddings, or its longest input is no
            number.
    """
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or isinstance(longest, bool) or not longest > 0:
        expected = "Expected model_max_length of the tokenizer to be a number above 0"
        raise UserError(f"{expected}, found {shown(longest)}: correct it in tokenizer_config.json.")
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


def check_tokenizer(lm: Any, source: Mapping[str, Any]) -> None:
    """Warns of signs that a loaded model was trained on other tokens than it gets now; `source` is its `config.json`.

    Raises:
        UserError: the checkpoint records another tokenizer than the one that lies in its folder.
    """
    tokenizer, config = lm.tokenizer, text_config(lm.model.config)
    entries, known = lm.model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if known < _LEAST_SHARE_OF_EMBEDDINGS * entries:
        logger.warning(
            "the model has %d embeddings, and its tokenizer %d tokens: is it another model's? tokenizer=... in "
            "--model_args names the right one",
            *(entries, known),
        )
    # as the file has it: a class's default says nothing of this tokenizer
    wanted, end = source.get("eos_token_id"), tokenizer.eos_token_id
    wanted = [wanted] if isinstance(wanted, int) else wanted
    if wanted and end is not None and end not in wanted and max(wanted) < entries:
        logger.warning(
            "eos_token_id is %s in the model's config.json and %d in its tokenizer: check that they belong together",
            *(" or ".join(map(str, wanted)), end),
        )
    trained_with_bos = str(config.model_type).startswith(_TRAINED_WITH_BOS) or _asks_for_bos(tokenizer.name_or_path)
    if trained_with_bos and not adds_bos(tokenizer):
        logger.warning(
            "this model was trained with a BOS token before every text, and none is added: pass add_bos_token=True in "
            "--model_args, unless the texts hold it"
        )
    if isinstance(lm.pretrained, str):
        _check_recorded_tokenizer(Path(lm.pretrained))


def warn_of_weights(model: nn.Module) -> None:
    """Says where weights are NaN or infinite: not every answer shows it."""
    if names := non_finite_weights(model):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        logger.warning("the checkpoint holds NaN or infinity in %s%s: copy it again", ", ".join(names[:3]), more)


def warn_of_other_tokens(tokenizer: Any, keys: Iterable[str]) -> None:
    """Says where the token ranges of a task were made with another tokenizer than the model's own."""
    own = tokenizer_sha256(tokenizer)
    others = [made_with for made_with in {tokenizer_behind(key) for key in keys} if not own.startswith(made_with)]
    if others:
        logger.warning(
            "the task's text was cut into tokens by another tokenizer (%s) than the model's (%s): leave tokenizer out "
            "of --metadata, unless they are the same",
            *(others[0], own[: len(others[0])]),
        )


def _asks_for_bos(name: str) -> bool:
    """Whether a saved tokenizer puts BOS before a text, or its settings ask for it, which not every class heeds."""
    with contextlib.suppress(OSError, ValueError):
        said = get_tokenizer_config(name, local_files_only=True).get("add_bos_token")
        return adds_bos(load_tokenizer(name, local_files_only=True)) if said is None else said is True
    return False


def _check_recorded_tokenizer(folder: Path) -> None:
    """Compares a folder's tokenizer with what `sbeval train` recorded, which other versions may write differently."""
    try:
        record = read_json_object(folder / "training_record.json", "the record of a training")
        recorded, version = record["tokenizer_sha256"], record["versions"]["tokenizers"]
    except (UserError, KeyError, TypeError):
        return
    if version != importlib.metadata.version("tokenizers"):
        return
    if recorded != (found := tokenizer_sha256(load_tokenizer(folder))):
        raise UserError(
            f"Expected the tokenizer that {folder} was trained with ({str(recorded)[:12]} in training_record.json), "
            f"found another ({found[:12]}): put the checkpoint's own tokenizer files back."
        )


def check_kv_expand(pretrained: str, released: CheckpointFormat | None, kv_expand: KvExpand) -> None:
    """Checks that nobody chooses how heads are laid out where a checkpoint says it.

    Raises:
        UserError: `kv_expand` is given where nothing asks for it.
    """
    if kv_expand != "auto" and not (released and released.takes_kv_expand):
        expected = "Expected kv_expand= for checkpoints of dolomite-engine only"
        remedy = "remove it from --model_args"
        raise UserError(f"{expected}, found kv_expand={kv_expand} for {pretrained}, which is none: {remedy}.")


def check_tensor_plan(config: Any, plan: Any) -> None:
    """Checks that the processes of this run can share each of a model's products by a tensor plan.

    Raises:
        UserError: the installed transformers splits matrices in another way, it knows no plan for the model, the
            key-value heads cannot be dealt out evenly, or there is one process, whose model transformers would leave
            on the CPU.
    """
    installed = installed_version("transformers")
    if installed is not None and Version(installed).release < OLDEST_TRANSFORMERS_OF_PLANS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS_OF_PLANS))
        raise UserError(
            f"tp_plan needs transformers {oldest} or newer, and {installed} is installed: upgrade transformers, or "
            "leave tp_plan out."
        )
    config, processes = text_config(config), int(os.environ.get("WORLD_SIZE", "1"))
    if plan == "auto" and not getattr(config, "base_model_tp_plan", None):
        remedy = "leave tp_plan out (context_parallel shares windows of this project's models)"
        raise UserError(f"Expected a model with a plan for tp_plan=auto, found {config.model_type}: {remedy}.")
    if processes == 1 and torch.cuda.is_available():
        remedy = "start one a GPU, as by sbeval launch --num_processes 2, or leave tp_plan out"
        raise UserError(f"Expected several processes for tp_plan, found one: {remedy}.")
    names = ("num_key_value_heads", "num_attention_heads")
    heads = next((count for name in names if (count := getattr(config, name, None))), processes)
    if heads % processes:
        expected = f"Expected processes that divide the model's {heads} key-value heads for tp_plan"
        raise UserError(f"{expected}, found {processes}: start fewer.")


def refuse_transformers_arguments(format_found: str, arguments: Mapping[str, Any], *, convertible: bool) -> None:
    """Checks the arguments of hf's `_create_model` for what only transformers' own loading does.

    `convertible` is whether `sbeval convert` rewrites the format.

    Raises:
        UserError: naming them.
    """
    given = sorted(
        name
        for name, value in arguments.items()
        if name not in _SETTLED | _OF_PARALLELIZE and value is not None and value is not False and value != ""
    )
    if given:
        expected = "Expected arguments that hold for every checkpoint format"
        remedy = "remove it from --model_args"
        remedy += ", or rewrite the checkpoint with `sbeval convert` first" if convertible else ""
        raise UserError(f"{expected}, found {', '.join(given)} with the format {format_found}: {remedy}.")


@functools.cache
def warn_of_versions() -> None:
    """Says once, in one line, which installed packages this release was not tested with; nothing is refused."""
    if outside := untested():
        logger.warning("this sbeval was not tested with %s: numbers may differ, or calls fail", outside)


def say_format(pretrained: str, name: str) -> None:
    """Logs which format was found, in one line."""
    format_logger.info("%s is a checkpoint of the format %s", pretrained, name)


def say_added_tokens(added: Mapping[str, Any]) -> None:
    """Logs what the tokenizer adds to a text; as a warning where it is more than a prefix, which is usual."""
    level = logging.WARNING if added["suffix"] else logging.INFO
    format_logger.log(level, "%s", added["sentence"])


def in_template(write: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of `hf` that writes with a chat template, which may be any code.

    Raises:
        UserError: there is none, it fails, or it writes more than can be meant.
    """

    @functools.wraps(write)
    def written(lm: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _little_memory():
                text = write(lm, *args, **kwargs)
                if text is not None and len(str.encode(text)) > _MOST_TEMPLATE_BYTES:
                    raise ValueError(f"it writes more than {_MOST_TEMPLATE_BYTES} bytes")
        except Exception as error:  # of any class, as code has them
            there = lm.tokenizer.chat_template
            what = "none" if there is None else f"one that fails ({first_line(error)})"
            several = ", name one that there is," if isinstance(there, dict) else ","
            raise UserError(
                f"Expected a chat template beside the tokenizer, found {what}: leave out --apply_chat_template, as "
                f"for any model that was not trained on chats{several} or mend the template."
            ) from error
        if getattr(lm, "session", None) is not None:
            lm.session.tally.chat |= write.__name__ == "apply_chat_template"
            if not (args[1] if len(args) > 1 else kwargs.get("add_generation_prompt", True)):
                lm.session.begun.add(hash(text))
        return text

    return written


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Holds this process, for one thread at a time, to some memory beyond what it has."""
    with _limiting:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0]) + _TEMPLATE_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (soft if 0 <= soft < most else most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
