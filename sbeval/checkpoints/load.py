"""Loads a checkpoint of any format: recognises the format from config.json, reads the weights, builds the model."""

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

from sbeval.checkpoints.facts import (
    KvExpand,
    checkpoint_format,
    extended_from,
    text_config,
    training_length_tokens,
)
from sbeval.checkpoints.files import Weights, find_folder, read_config, some, weight_file_bytes
from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.checkpoints.registry import CheckpointFormat, format_of_type
from sbeval.checkpoints.unread import Report, UnreadTensors, settle_unread, settle_unread_files
from sbeval.checkpoints.values import names_quantisation
from sbeval.checkpoints.versions import check_transformers
from sbeval.errors import UserError, brief, first_line, raised_here
from sbeval.hub_names import is_hub_id, local_path
from sbeval.models import SbevalConfig

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=PreTrainedModel)
OLDEST_TRANSFORMERS_OF_FP8 = (5, 17)
"""transformers 5.16 looks up the expert-parallel plan of every model with fp8 weights, and fails if there is none."""

_ALIGNMENT_BYTES = 64  # alignment of PyTorch's CPU allocator


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """A loaded model and facts about its checkpoint.

    Attributes:
        model: the model in evaluation mode: an sbeval model, ModuleFormer, or a model of transformers.
        format: "sbeval", "dolomite:<generation>", "fla:stickbreaking_attn", "moduleformer" or
            "huggingface:<model type>".
        training_length_tokens: training length before any RoPE scaling, or None if unknown.
        extended_from: the checkpoint whose context was extended to make this one, or None.
        attention: the attention scheme; for a model of transformers, its model type.
        folder: folder with the files; None for a transformers model of the hub, whose files are in the hub's cache.
        extendable: whether the model can be trained and saved again, as for a context extension.
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
"""A checkpoint's format and the contents of its config.json.

The format is None if transformers loads the checkpoint; the contents are empty if there is no config.json.
"""


def released_format(path_or_id: str | Path, revision: str | None = None) -> FoundFormat:
    """Recognises the format of a checkpoint from its config.json, the only file that is downloaded from the hub."""
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
    detected_format: FoundFormat | None = None,
    allow_unread: Sequence[str] | None = None,
) -> LoadedCheckpoint:
    """Recognises a checkpoint's format and loads it.

    Args:
        path_or_id: folder or hub id.
        dtype: dtype of the parameters; "auto" means the checkpoint's.
        device: device of the loaded model.
        kv_expand: which key/value head a stick-breaking query head uses in dolomite checkpoints (`read_dolomite`).
        trust_remote_code: whether a model of transformers may run code from the checkpoint.
        revision: branch, tag or commit on the hub.
        detected_format: result of `released_format`, if it was called before.
        allow_unread: glob patterns of tensors that a transformers model, or the index of a model's shards, may leave
            unread. None allows none, and error messages then do not mention the option.

    Raises:
        UserError: there is no checkpoint, files are missing or damaged, a feature is not supported, or the model does
            not read all tensors.
    """
    requested_dtype = _dtype(dtype)
    released, source = detected_format or released_format(path_or_id, revision)
    model: Any
    folder: Path | None = None
    name: str | None = None
    unread: list[UnreadTensors] = []
    unread_options: dict[str, Any] = {"allow_unread": allow_unread, "report": unread.append}
    if released is None and is_hub_id(path_or_id):
        model = from_transformers(str(path_or_id), requested_dtype, trust_remote_code, revision, **unread_options)
    else:
        folder = find_folder(path_or_id, revision)
        source = source or read_config(folder)
        weights = Weights(folder)
        weights.check(source)
        unread.append(settle_unread_files(weights, allow_unread))
        if released is None:
            model = from_transformers(str(folder), requested_dtype, trust_remote_code, None, **unread_options)
        else:
            name, model_config, tensors = released.read(source, weights, kv_expand)
            model = build(released.model_class, model_config, tensors, requested_dtype or weights.dtype())
        model.name_or_path = model.config.name_or_path = str(folder)
    config = model.config
    is_sbeval = isinstance(config, SbevalConfig)
    return LoadedCheckpoint(
        model=model.to(device).eval(),
        format=name or checkpoint_format(config),
        training_length_tokens=training_length_tokens(config),
        extended_from=extended_from(config),
        attention=config.scheme if is_sbeval or released is not None else str(config.model_type),
        folder=folder,
        extendable=released is None or released.extendable,
        unread=functools.reduce(operator.or_, unread, UnreadTensors()),
    )


def build(kind: type[Model], config: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> Model:
    """Builds a model of class `kind` from exactly these tensors; empties `tensors` to free memory early."""
    with torch.device("meta"):
        model = kind(config)
    # popping a tensor releases its memory-mapped file as soon as it is copied
    state_dict = {name: _in_own_storage(tensors.pop(name).to(dtype)) for name in list(tensors)}
    if config.tie_word_embeddings:
        state_dict["lm_head.weight"] = state_dict["model.embed_tokens.weight"]
    model.load_state_dict(state_dict, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    align_weights(model)
    return model


def align_weights(model: nn.Module) -> None:
    """Copies weights on a CPU whose address is not a multiple of 64, as in a memory-mapped file, one at a time.

    BLAS libraries sum in another order for unaligned matrices. Without this, the seventh digit of a result would
    depend on the length of the file's header, after which its tensors begin. Loading 1.3 GB of fp32 weights takes
    0.65 s of CPU time instead of 0.1 s, and needs memory for one copy and 0.2 GB, since the system can drop the mapped
    pages.
    """
    for weight in (*model.parameters(), *model.buffers()):
        if weight.device.type == "cpu" and type(weight.data) is Tensor and weight.data_ptr() % _ALIGNMENT_BYTES:
            weight.data = weight.data.clone()


def _in_own_storage(tensor: Tensor) -> Tensor:
    """Copies a tensor if it is a view of a larger storage, which it would keep in memory."""
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
    """Registers flash-linear-attention's models with transformers, if that package is installed."""
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
    """Loads a model with an Auto class of transformers, and checks that model and checkpoint have the same tensors.

    transformers only warns of a tensor that the checkpoint lacks, which it initialises at random, and of one that the
    model does not have, which it ignores. The model is loaded with `return_dict=True`.

    Args:
        auto_class: class of transformers such as `AutoModelForCausalLM`.
        name: folder or hub id.
        allow_unread: glob patterns of tensors that the model may leave unread; None if the user has no such option.
        report: called with the tensors that the model leaves unread.
        arguments: arguments of `from_pretrained`; `tp_plan` is converted to a `DistributedConfig`.

    Raises:
        UserError: tensors are missing, unread or have a wrong shape, or the files are too small for the configuration.
    """
    if arguments.get("device_map") != "meta":
        folder = Path(name) / (arguments.get("subfolder") or "")
        _check_room(auto_class, folder, trust_remote_code=bool(arguments.get("trust_remote_code")))
    if (plan := arguments.pop("tp_plan", None)) is not None:
        arguments["distributed_config"] = DistributedConfig(tp_plan=plan)
    loaded = auto_class.from_pretrained(
        name, output_loading_info=True, **{**arguments, "ignore_mismatched_sizes": True, "return_dict": True}
    )
    # a checkpoint's own code may load in its own way and return no loading info
    model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
    align_weights(model)
    if info is None:
        return model
    for tensor, shape, expected in sorted(info["mismatched_keys"]):
        raise UserError(f"{tensor} should have the shape {list(expected)} by the configuration, but has {list(shape)}")
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
    """Returns the folder from which transformers has read a checkpoint, or None if it is unknown."""
    if not is_hub_id(name):
        return Path(name) / (arguments.get("subfolder") or "")
    options: dict[str, Any] = {"revision": arguments.get("revision"), "subfolder": arguments.get("subfolder") or None}
    with contextlib.suppress(HfHubHTTPError, HFValidationError, OSError):
        return Path(hf_hub_download(name, "config.json", **options)).parent
    return None


def _check_room(auto_class: Any, folder: Path, *, trust_remote_code: bool) -> None:
    """Checks that the weight files are large enough for the configuration's model, before memory for it is allocated.

    The model is built on the meta device, so sizes that are defaults of the model type are checked too. They are too
    large if config.json has a wrong `model_type`.
    """
    most_parameters = weight_file_bytes(folder)
    if not most_parameters:  # a hub id, or weights in another file format
        return
    parameters, model_type = 0, ""
    with contextlib.suppress(Exception), quiet_transformers(), torch.device("meta"):  # loading reports such errors
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model_type = config.model_type
        if names_quantisation(config.to_dict()):
            most_parameters *= 8
        model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        parameters = sum(weight.numel() for weight in model.parameters())
    if parameters > most_parameters:
        raise UserError(
            f"the configuration is of a {model_type} model with {parameters:,} parameters, but the weight files in "
            f"{folder} have room for at most {most_parameters:,}; correct the configuration or complete the download"
        )


def check_quantisation(config: Any, folder: Path) -> None:
    """Checks that transformers can read a checkpoint's quantisation.

    If the method is unknown to transformers and all weights are in floating point, a warning is logged and
    `quantization_config` is removed from `config`.

    Raises:
        UserError: `quantization_config` has no `quant_method`, its package is missing, or it is unknown and the weights
            in `folder` are missing or not all in floating point.
    """
    configs = (config, text_config(config))
    owner = next((candidate for candidate in configs if hasattr(candidate, "quantization_config")), None)
    if owner is None or not isinstance(quantization := owner.quantization_config, Mapping):
        return
    if quantization.get("quant_method") == "fp8":
        check_transformers(
            OLDEST_TRANSFORMERS_OF_FP8, "Loading weights in fp8", remedy="use weights that are not quantised"
        )
    try:
        AutoQuantizationConfig.from_dict(dict(quantization))
    except Exception as error:  # each quantisation method raises its own errors
        with contextlib.suppress(UserError):  # there are no weight files to look at
            method = quantization.get("quant_method")
            unknown = isinstance(method, str) and method not in AUTO_QUANTIZATION_CONFIG_MAPPING
            if unknown and Weights(folder).all_in_floating_point():
                logger.warning("ignoring quant_method %s: it is unknown, and no weight is quantised", brief(method))
                del owner.quantization_config
                return
        raise UserError(
            f"transformers cannot read the quantisation quant_method={brief(quantization.get('quant_method'))} here "
            f"({first_line(error)}); install its package, or use weights that are not quantised"
        ) from error


def from_transformers(
    name: str, dtype: torch.dtype | None, trust_remote_code: bool, revision: str | None, **options: Any
) -> PreTrainedModel:
    """Loads a folder or a hub id with transformers; `options` are further arguments of `load_whole`.

    Raises:
        UserError: transformers cannot load it, or model and checkpoint do not have the same tensors.
    """
    source: dict[str, Any] = {"trust_remote_code": trust_remote_code} | ({"revision": revision} if revision else {})
    register_fla_models()
    try:
        check_quantisation(AutoConfig.from_pretrained(name, **source), Path(name))
        loaded: PreTrainedModel = load_whole(AutoModelForCausalLM, name, dtype=dtype or "auto", **source, **options)
    except UserError:
        raise
    except Exception as error:  # a broken file can cause an error of any class
        if raised_here(error) or isinstance(error, MemoryError):
            raise
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise UserError(
                f"the model in {name} needs code of its own (auto_map): read that code; if you trust it, evaluate with "
                "trust_remote_code=True in --model_args."
            ) from error
        raise UserError(f"transformers cannot load the checkpoint {name}: {first_line(error)}") from error
    return loaded
