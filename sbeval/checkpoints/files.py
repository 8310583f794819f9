"""Finds the files of a checkpoint, checks that they are complete, and reads single tensors."""

import contextlib
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sbeval.checkpoints.facts import refuse_adapter
from sbeval.checkpoints.values import check_sizes, names_quantisation
from sbeval.errors import UserError, brief, first_line
from sbeval.foreign_files import fits, read_json_object
from sbeval.hub_names import is_hub_id, local_path

# in the order in which transformers looks for them
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MOST_LABELS = 2**20
_WEIGHT_SUFFIXES = ("weight", "proj", "bias")
_MASKS = (".attn.bias", "attention.bias", "attention_bias")
_MOST_DIMENSIONS = 3
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
# adapters, Mistral's own format, and variants such as model.fp16.safetensors: a user selects these by name
_OTHER_USES = re.compile(
    r"adapter_model|consolidated|(model|pytorch_model)(-\d+-of-\d+)?\.\w+(-\d+-of-\d+)?\.(safetensors|bin)$"
)
_FLOATING_POINT = re.compile(r"(F|FLOAT)(16|32|64)$")  # not 8 bits, since those have separate scales


def find_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a checkpoint; a hub id is downloaded.

    Raises:
        UserError: there is no such folder, or the hub has no such repository or cannot be reached.
    """
    path = local_path(path_or_id)
    if path.is_dir():
        return path
    name = str(path_or_id)
    if not is_hub_id(path_or_id):
        raise UserError(f"Expected a checkpoint folder or a hub id such as owner/name, found nothing at {name!r}")
    other_files = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*other_files, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*other_files, "*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = first_line(error)
        raise UserError(
            f"there is no folder {name!r}, and no checkpoint of that name could be downloaded from the hub: {reason}"
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of config.json.

    Raises:
        UserError: it is missing, cannot be read, or has a `num_labels` for which transformers would run out of memory.
    """
    path = folder / "config.json"
    refuse_adapter(folder)
    if not path.is_file():
        raise UserError(f"{folder} has no config.json, which every checkpoint folder needs")
    config = read_json_object(path, "the configuration of a checkpoint", nan=False)
    for section in (config, *config.values()):
        if isinstance(section, dict) and fits(labels := section.get("num_labels", 0), int) and labels > _MOST_LABELS:
            raise UserError(f"num_labels in {path} must be at most {_MOST_LABELS}, found {labels}; correct it")
    return config


def check_weights(folder: Path, config: dict[str, Any] | None = None) -> "Weights | None":
    """Checks, before transformers loads a folder, that its files are complete and large enough for the configuration.

    A single pytorch_model.bin that `Weights` cannot open is left to transformers, which reads more kinds of pickles.

    Args:
        folder: folder of the checkpoint.
        config: contents of config.json, if they were read before.

    Returns:
        The weights, or None if the folder has none that `Weights` can open.

    Raises:
        UserError: a file is missing or damaged, an index is invalid, or the configuration needs larger files.
    """
    for name in (*_SAFETENSORS, *_PICKLES):
        if (folder / name).is_file():
            config = config or read_config(folder)
            try:
                weights = Weights(folder)
            except UserError:
                if name != _PICKLES[0]:
                    raise
                size = (folder / name).stat().st_size
                check_sizes(config, tensors=size, weight_bytes=size)
                return None
            weights.check(config)
            return weights
    return None


def weight_file_bytes(folder: Path) -> int:
    """Returns the total bytes of the weight files in a folder, and of shards in other folders that an index names."""
    files = {*folder.glob("*")}
    for name in (_SAFETENSORS[1], _PICKLES[1]):
        if (folder / name).is_file():
            with contextlib.suppress(UserError):  # loading reports what is wrong with the index
                files |= {folder / shard for shard in _shards(folder / name)}
    return sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".bin") and file.is_file())


class Weights:
    """The tensors of a checkpoint by name; records which a reader takes, so that `refuse_left_over` finds the rest.

    Attributes:
        folder: the checkpoint's folder.
        source: name of the file that holds the tensors, or of the index that names their shards.
    """

    def __init__(self, folder: Path, files: Sequence[str] = (*_SAFETENSORS, *_PICKLES)) -> None:
        """Opens the first of `files` that exists, and all shards if it is an index, to find missing or damaged ones.

        Raises:
            UserError: weight files are missing or damaged, or a shard lacks tensors that the index names.
        """
        self.folder = folder
        self.source = ""
        self._file_of: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._taken: set[str] = set()
        for name in files:
            if (folder / name).is_file():
                self.source = name
                self._open(folder / name)
                return
        raise UserError(f"Expected model.safetensors, pytorch_model.bin or an index of shards in {folder}, found none")

    def _open(self, path: Path) -> None:
        if path.suffix != ".json":
            self._add(path, None)
            return
        shards = _shards(path)
        if missing := sorted(shard for shard in shards if not (self.folder / shard).is_file()):
            raise UserError(
                f"{path.name} names {len(shards)} shards, of which {len(missing)} are missing in {self.folder}: "
                f"{some(missing)}; complete the download"
            )
        for shard, tensors in sorted(shards.items()):
            self._add(self.folder / shard, tensors)

    def _add(self, path: Path, expected: set[str] | None) -> None:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names = set(file.keys())
                    for name in names:
                        tensor = file.get_slice(name)
                        self._dtypes[name], self._shapes[name] = tensor.get_dtype(), tuple(tensor.get_shape())
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
                    raise ValueError("it is not a dictionary from names to tensors")
                self._pickled.update(tensors)
                self._dtypes |= {name: str(tensor.dtype).upper() for name, tensor in tensors.items()}
                self._shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                names = set(tensors)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            raise UserError(
                f"{path} is truncated or damaged ({first_line(error)}); copy it or download it again"
            ) from error
        if absent := (expected or set()) - names:
            raise UserError(f"{path} lacks tensors that its index names: {some(absent)}; download it again")
        self._file_of.update(dict.fromkeys(names, path))

    def check(self, config: Mapping[str, Any]) -> None:
        """Checks that the files are large enough for a configuration, and that weights are in floating point.

        Integer or boolean weights are allowed only if config.json names a quantisation; without one, loading would cast
        them. Attention masks and positions may be integers or booleans in any checkpoint.

        Raises:
            UserError: the files are too small, or a weight is not in floating point.
        """
        size = sum(file.stat().st_size for file in set(self._file_of.values()))
        check_sizes(config, tensors=len(self._file_of), weight_bytes=size)
        if names_quantisation(config):
            return
        not_floating = [name for name in self._dtypes if not self.is_floating_point(name)]
        weights = [name for name in not_floating if name.endswith(_WEIGHT_SUFFIXES) and not f".{name}".endswith(_MASKS)]
        if integers := [name for name in weights if len(self.shape(name)) <= _MOST_DIMENSIONS]:
            raise UserError(
                f"config.json in {self.folder} names no quantisation, but these weights are integers or booleans: "
                f"{some(integers)}; save the checkpoint again, with its quantization_config if it has one"
            )

    def unread_files(self) -> dict[Path, list[str]]:
        """Returns the weight files beside these that are not read, each with its tensors that these weights lack.

        A file that is no shard gets no tensors, since it may be a model of its own.
        """
        candidates = self.folder.glob("pytorch_model*.bin" if self._pickled else "*.safetensors")
        unread = sorted(path for path in {*candidates} - {*self._file_of.values()} if not _OTHER_USES.match(path.name))
        return {path: self._missing_from(path) if _SHARD.fullmatch(path.name) else [] for path in unread}

    def _missing_from(self, path: Path) -> list[str]:
        """Returns the names of tensors in another file that these weights lack."""
        try:
            return [name for name in Weights(self.folder, (path.name,)).names() if name not in self]
        except UserError:  # a damaged file could not supply the tensors
            return []

    def all_in_floating_point(self) -> bool:
        """Whether every tensor is in floating point with at least 16 bits."""
        return all(map(_FLOATING_POINT.search, self._dtypes.values()))

    def is_floating_point(self, name: str) -> bool:
        """Whether a tensor is in floating point of any width."""
        return "F" in self._dtypes[name]

    def names(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def dtype(self) -> torch.dtype:
        """Returns the dtype of the first floating point tensor, by name.

        Raises:
            UserError: there is none.
        """
        for name in sorted(self._file_of):
            tensor = self._read(name)
            if tensor.is_floating_point():
                return tensor.dtype
        raise UserError(f"the checkpoint in {self.folder} has no floating point tensor")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading the tensor."""
        self._path(name)
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Reads a tensor without marking it as taken."""
        return self._read(name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor, checks its shape, and marks it as taken.

        Raises:
            UserError: it is missing or has another shape.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{name} should have the shape {list(shape)} by the configuration, but has {list(tensor.shape)}"
            )
        self._taken.add(name)
        return tensor

    def drop(self, names: Iterable[str]) -> None:
        """Marks tensors as taken that a model does not need, so that `refuse_left_over` accepts them."""
        self._taken.update(names)

    def refuse_left_over(self, layout: str) -> None:
        """Raises a UserError if any tensor was not taken; `layout` names the format in the message."""
        if names := set(self._file_of) - self._taken:
            raise UserError(f"the checkpoint has tensors that are not part of the {layout} format: {some(names)}")

    def check_tied_head(self, embedding: Tensor) -> None:
        """Checks that `lm_head.weight` of a model with tied embeddings, if it is in the files, equals the embedding.

        Raises:
            UserError: the two differ.
        """
        if "lm_head.weight" not in self:
            return
        head = self.take("lm_head.weight", tuple(embedding.shape))
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise UserError(
                "lm_head.weight differs from the embedding although tie_word_embeddings is true or absent; set "
                "tie_word_embeddings to false in config.json"
            )

    def _path(self, name: str) -> Path:
        if name not in self._file_of:
            raise UserError(f"the checkpoint in {self.folder} lacks the tensor {name}")
        return self._file_of[name]

    def _read(self, name: str) -> Tensor:
        path = self._path(name)
        if name in self._pickled:
            return self._pickled[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _shards(path: Path) -> dict[str, set[str]]:
    """Reads an index of shards; maps the name of each shard to the names of its tensors.

    Raises:
        UserError: the file is not such an index.
    """
    index = read_json_object(path, "an index of shards", remedy="download it again").get("weight_map")
    if not isinstance(index, dict):
        raise UserError(f"{path} is not an index of shards, since it has no weight_map; download it again")
    shards: dict[str, set[str]] = {}
    for tensor, shard in index.items():
        if not isinstance(shard, str) or not _is_within(shard):
            raise UserError(
                f"{path} is not a valid index of shards: {brief(tensor)} is mapped to {brief(shard)}, which is not the "
                "name of a file in its folder; download it again"
            )
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _is_within(name: str) -> bool:
    """Whether a relative path stays within its folder."""
    path = Path(name)
    return path.name != "" and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def some(names: Iterable[str]) -> str:
    """Joins the first three names in sorted order, and appends how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
