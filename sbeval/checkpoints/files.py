"""The files of a checkpoint: found, checked to be whole, and read one tensor at a time."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sbeval.errors import UserError

_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")


def is_hub_id(path_or_id: str | Path) -> bool:
    """Whether a name can only mean a repository of the hub: nothing is there, and it does not look like a path."""
    name = str(path_or_id)
    looks_like_path = isinstance(path_or_id, Path) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    return not looks_like_path and not Path(name).exists()


def find_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a checkpoint, downloading it where it is named by its hub id.

    Raises:
        UserError: there is no such folder, or the hub has no such repository or cannot be reached.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_id)
    if not is_hub_id(path_or_id):
        raise UserError(f"expected a checkpoint folder or a hub id such as owner/name, found nothing at {name!r}")
    texts = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*texts, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*texts, "*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no folder {name!r} here, and the hub gave no checkpoint of that name: {reason}") from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"a checkpoint folder holds a config.json, {folder} has none")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object, found a {type(config).__name__}")
    return config


def check_shards(folder: Path) -> None:
    """Checks that every tensor named by an index of shards is there, in a shard that can be read.

    Raises:
        UserError: a shard is missing, damaged, or lacks a tensor.
    """
    for whole, index in ((_SAFETENSORS[1], _SAFETENSORS[0]), (_PICKLES[1], _PICKLES[0])):
        if (folder / whole).is_file():
            return
        if (folder / index).is_file():
            Weights(folder)
            return


class Weights:
    """The tensors of a checkpoint by name, each taken once and checked for its shape."""

    def __init__(self, folder: Path) -> None:
        """Opens every file, so that a missing or damaged one is found before anything is computed.

        Raises:
            UserError: weights are missing, damaged, or not where the index says.
        """
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
        self._taken: set[str] = set()
        for name in (*_SAFETENSORS, *_PICKLES):
            if (folder / name).is_file():
                self._open(folder / name)
                return
        raise UserError(f"expected model.safetensors, pytorch_model.bin or an index of shards in {folder}, found none")

    def _open(self, path: Path) -> None:
        if path.suffix != ".json":
            self._add(path, None)
            return
        try:
            index: dict[str, str] = json.loads(path.read_text())["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no index of shards: {error!r}") from error
        shards: dict[str, set[str]] = {}
        for tensor, shard in index.items():
            shards.setdefault(shard, set()).add(tensor)
        missing = sorted(shard for shard in shards if not (self.folder / shard).is_file())
        if missing:
            raise UserError(
                f"{path.name} names {len(shards)} shards, of which {len(missing)} are missing in {self.folder}: "
                f"{_some(missing)}; complete the download"
            )
        for shard, tensors in sorted(shards.items()):
            self._add(self.folder / shard, tensors)

    def _add(self, path: Path, expected: set[str] | None) -> None:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names = set(file.keys())
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self._pickled.update(tensors)
                names = set(tensors)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{path} is truncated or damaged ({reason}); download it again") from error
        absent = (expected or set()) - names
        if absent:
            raise UserError(f"{path} lacks tensors its index names: {_some(absent)}; download it again")
        self._file_of.update(dict.fromkeys(names, path))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def dtype(self) -> torch.dtype:
        """Returns the dtype of the first floating point tensor."""
        for name in sorted(self._file_of):
            tensor = self._read(name)
            if tensor.is_floating_point():
                return tensor.dtype
        raise UserError(f"the checkpoint in {self.folder} holds no floating point tensor")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading it."""
        path = self._path(name)
        if name in self._pickled:
            return tuple(self._pickled[name].shape)
        with safe_open(path, framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor.

        Raises:
            UserError: it is missing or its shape is another.
        """
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            raise UserError(f"{name} should be {list(shape)} by the configuration, but is {list(tensor.shape)}")
        self._taken.add(name)
        return tensor

    def drop(self, names: Iterable[str]) -> None:
        """Marks tensors as not needed."""
        self._taken.update(names)

    def left_over(self) -> list[str]:
        """Returns the names nobody took."""
        return sorted(set(self._file_of) - self._taken)

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


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
