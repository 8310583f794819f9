"""One entry for every checkpoint format: the format is found by looking, then loaded."""

import contextlib
import dataclasses
import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

from sbeval.checkpoints.facts import KvExpand, checkpoint_format, text_config, training_length_tokens
from sbeval.checkpoints.files import Weights, find_folder, held_bytes, read_config, some
from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.checkpoints.registry import CheckpointFormat, format_of_type
from sbeval.checkpoints.unread import Report, UnreadTensors, settle_unread
from sbeval.checkpoints.values import names_quantisation
from sbeval.errors import UserError, first_line, raised_here, shown
from sbeval.hub_names import is_hub_id, local_path
from sbeval.models import SbevalConfig

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=PreTrainedModel)
_ALIGNMENT_BYTES = 64  # where torch's own allocator places tensors on a CPU


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A model ready to run, and what its checkpoint says of it.

    Attributes:
        model: in evaluation mode; of this family, or a transformers model.
        format: "sbeval", "dolomite:<generation>", "fla:stickbreaking_attn", "moduleformer" or
            "huggingface:<model type>".
        training_length_tokens: training length before any scaling, None where unknown.
        extended_from: the parent of a context extension, or None.
        attention: the scheme, or a transformers model's type.
        folder: where the files are; None for a transformers model of the hub, whose files are in its cache.
        extendable: whether the model can be trained and saved again.
        unread: tensors of the files that the model does not read.
    """

    model: PreTrainedModel
    format: str
    training_length_tokens: int | None
    extended_from: dict[str, Any] | None
    attention: str
    folder: Path | None
    extendable: bool
    unread: UnreadTensors = dataclasses.field(default_factory=UnreadTensors)


FoundFormat = tuple[CheckpointFormat | None, dict[str, Any]]
"""The format that `load_checkpoint` reads, and the contents of the `config.json` that says so.

No format where transformers loads the checkpoint itself; no contents where nothing is found.
"""


def released_format(path_or_id: str | Path, revision: str | None = None) -> FoundFormat:
    """Finds which format beyond transformers' own a checkpoint has, from its `config.json` alone."""
    folder = local_path(path_or_id)
    if is_hub_id(path_or_id):
        try:
            folder = Path(hf_hub_download(str(path_or_id), "config.json", revision=revision)).parent
        except (HfHubHTTPError, HFValidationError, OSError):
            return None, {}
    if not (folder / "config.json").is_file():
        return None, {}
    source = read_config(folder)
    return format_of_type(str(source.get("model_type"))), source


def load_checkpoint(
    path_or_id: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    kv_expand: KvExpand = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    found_format: FoundFormat | None = None,
    allow_unread: Sequence[str] | None = None,
) -> LoadedCheckpoint:
    """Finds a checkpoint's format and loads it.

    `dtype` is that of the parameters, "auto" the checkpoint's; `kv_expand` is how dolomite's grouped stick-breaking
    heads share keys and values (`read_dolomite`); `trust_remote_code` runs code that a checkpoint of another model type
    brings; `revision` is a branch, tag or commit; `found_format` is from `released_format`, if it was called before;
    `allow_unread` are glob patterns of tensors that a transformers model may leave unread, None where a sentence about
    others names no such option.

    Raises:
        UserError: nothing is found, files are missing or damaged, a part is not supported, or the model leaves tensors
            unread.
    """
    wanted = _dtype(dtype)
    released, source = found_format or released_format(path_or_id, revision)
    model: Any
    folder: Path | None = None
    name: str | None = None
    unread: list[UnreadTensors] = []
    checked: dict[str, Any] = {"allow_unread": allow_unread, "report": unread.append}
    if released is None and is_hub_id(path_or_id):
        model = from_transformers(str(path_or_id), wanted, trust_remote_code, revision, **checked)
    else:
        folder = find_folder(path_or_id, revision)
        source = source or read_config(folder)
        weights = Weights(folder)
        weights.check(source)
        if released is None:
            model = from_transformers(str(folder), wanted, trust_remote_code, None, **checked)
        else:
            name, read, tensors = released.read(source, weights, kv_expand)
            model = build(released.model_class, read, tensors, wanted or weights.dtype())
        model.name_or_path = model.config.name_or_path = str(folder)
    config = model.config
    family = isinstance(config, SbevalConfig)
    return LoadedCheckpoint(
        model=model.to(device).eval(),
        format=name or checkpoint_format(config),
        training_length_tokens=training_length_tokens(config),
        extended_from=config.extended_from if family else None,
        attention=config.scheme if family or released is not None else str(config.model_type),
        folder=folder,
        extendable=released is None or released.extendable,
        unread=functools.reduce(operator.or_, unread, UnreadTensors()),
    )


def build(kind: type[Model], config: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> Model:
    """Returns a model with these tensors, none missing and none too many; empties `tensors`."""
    with torch.device("meta"):
        model = kind(config)
    owned = {name: _alone(tensors.pop(name).to(dtype)) for name in list(tensors)}  # a mapped file goes as it is copied
    if config.tie_word_embeddings:
        owned["lm_head.weight"] = owned["model.embed_tokens.weight"]
    model.load_state_dict(owned, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    align_weights(model)
    return model


def align_weights(model: nn.Module) -> None:
    """Moves a CPU's weights that lie elsewhere, as in a mapped file, to multiples of 64 bytes, one at a time.

    Products of matrices add in another order where a matrix begins elsewhere, so the last digits of a number would
    depend on the length of a file's header.
    """
    for weight in (*model.parameters(), *model.buffers()):
        if weight.device.type == "cpu" and type(weight.data) is Tensor and weight.data_ptr() % _ALIGNMENT_BYTES:
            weight.data = weight.data.clone()


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in storage of its own, so that a part does not keep the whole it was cut from."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    if dtype == "auto":
        return None
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise UserError(f"dtype must be auto or a floating point type such as bfloat16, got {dtype!r}")
    return named


def register_fla_models() -> None:
    """Makes flash-linear-attention's models known to transformers where that package is installed."""
    with contextlib.suppress(ImportError, RuntimeError):
        import fla.models  # noqa: F401  (registers its model types)


def load_whole(
    auto_class: Any,
    name: str,
    *,
    allow_unread: Sequence[str] | None = None,
    report: Report | None = None,
    **arguments: Any,
) -> Any:
    """Returns what an Auto class of transformers loads, provided that model and checkpoint have the same tensors.

    transformers leaves a tensor that a checkpoint lacks at its random initial value, and passes over one that the model
    does not have, each with a warning. `allow_unread` are glob patterns of tensors that may be passed over, None where
    the user cannot name any; `report` takes all that are. What a model returns is an object, as it is read here,
    whatever the configuration says.

    Raises:
        UserError: tensors are missing, unread or of another shape, or no file could hold them.
    """
    if arguments.get("device_map") != "meta":
        folder = Path(name) / (arguments.get("subfolder") or "")
        _check_room(auto_class, folder, trust_remote_code=bool(arguments.get("trust_remote_code")))
    if (plan := arguments.pop("tp_plan", None)) is not None:
        arguments["distributed_config"] = DistributedConfig(tp_plan=plan)
    loaded = auto_class.from_pretrained(
        name, output_loading_info=True, **{**arguments, "ignore_mismatched_sizes": True, "return_dict": True}
    )
    # code that a checkpoint brings along may load in its own way, and say nothing of the tensors
    model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
    align_weights(model)
    if info is None:
        return model
    for tensor, shape, expected in sorted(info["mismatched_keys"]):
        raise UserError(f"{tensor} should be {list(expected)} by the configuration, but is {list(shape)}")
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"the checkpoint {name} lacks tensors: {some(missing)}; complete the download or save it again")
    files = None if arguments.get("gguf_file") else _files_of(name, arguments)
    trusted = {"trust_remote_code": bool(arguments.get("trust_remote_code"))}
    unread = settle_unread(model, info["unexpected_keys"], files, name=name, allow_unread=allow_unread, **trusted)
    if report is not None:
        report(unread)
    return model


def _files_of(name: str, arguments: Mapping[str, Any]) -> Path | None:
    """Returns the folder from which transformers has read a checkpoint, None where it is not known."""
    if not is_hub_id(name):
        return Path(name) / (arguments.get("subfolder") or "")
    options: dict[str, Any] = {"revision": arguments.get("revision"), "subfolder": arguments.get("subfolder") or None}
    with contextlib.suppress(HfHubHTTPError, HFValidationError, OSError):
        return Path(hf_hub_download(name, "config.json", **options)).parent
    return None


def _check_room(auto_class: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """Refuses a configuration whose model has more numbers than weight files can hold, before it is made.

    What it has by default counts too, as where the model type of another model is written.
    """
    if not (held := held_bytes(folder)):  # of the hub, or of another kind
        return
    asked = 0
    model_type = ""
    with contextlib.suppress(Exception), quiet_transformers(), torch.device("meta"):  # loading says what is wrong
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model_type = config.model_type
        held = held * (8 if names_quantisation(config.to_dict()) else 1)
        model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        asked = sum(weight.numel() for weight in model.parameters())
    if asked > held:
        raise UserError(
            f"Expected a configuration that fits the weights, found a {model_type} of {asked:,} numbers, and files in "
            f"{folder} that hold at most {held:,}; mend the configuration or complete the download"
        )


def check_quantisation(config: Any, folder: Path) -> None:
    """Checks that transformers can read a checkpoint of this configuration here; what it passes over is taken out.

    Raises:
        UserError: it is quantised by a method that is not named, whose package is missing, or that is unknown where
            weights in `folder` are not floating point, or none are there.
    """
    places = (config, text_config(config))
    place = next((place for place in places if hasattr(place, "quantization_config")), None)
    if place is None or not isinstance(quantised := place.quantization_config, Mapping):
        return
    try:
        AutoQuantizationConfig.from_dict(dict(quantised))
    except Exception as error:  # of any class, as each method's own
        with contextlib.suppress(UserError):  # nothing there that can be looked at
            method = quantised.get("quant_method")  # transformers reads weights without one it does not know
            unknown = isinstance(method, str) and method not in AUTO_QUANTIZATION_CONFIG_MAPPING
            if unknown and Weights(folder).all_in_floating_point():
                logger.warning(
                    "quant_method %s is passed over: it is unknown, and no weight is quantised", shown(method)
                )
                del place.quantization_config
                return
        raise UserError(
            "Expected a quantisation that transformers can read here, found quant_method "
            f"{shown(quantised.get('quant_method'))} ({first_line(error)}); install its package, or take weights that "
            "are not quantised"
        ) from error


def from_transformers(
    name: str, dtype: torch.dtype | None, trust_remote_code: bool, revision: str | None, **options: Any
) -> PreTrainedModel:
    """Loads a folder or a hub id as transformers does; `options` are further arguments of its Auto class.

    Raises:
        UserError: transformers cannot load it, or not every weight comes from the checkpoint.
    """
    where: dict[str, Any] = {"trust_remote_code": trust_remote_code} | ({"revision": revision} if revision else {})
    register_fla_models()
    try:
        check_quantisation(AutoConfig.from_pretrained(name, **where), Path(name))
        loaded: PreTrainedModel = load_whole(AutoModelForCausalLM, name, dtype=dtype or "auto", **where, **options)
    except UserError:
        raise
    except Exception as error:  # a broken file is answered with any class
        if raised_here(error) or isinstance(error, MemoryError):
            raise
        if not trust_remote_code and "trust_remote_code" in str(error):
            expected = f"Expected a model that transformers knows in {name}, found code of its own (auto_map)"
            remedy = "read that code; if you trust it, evaluate with trust_remote_code=True in --model_args"
            raise UserError(f"{expected}: {remedy}.") from error
        raise UserError(f"transformers cannot load the checkpoint {name}: {first_line(error)}") from error
    return loaded
