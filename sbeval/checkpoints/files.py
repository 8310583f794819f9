"""The files of a checkpoint: found, checked to be whole, and read one tensor at a time."""

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
from sbeval.errors import UserError, first_line, shown
from sbeval.foreign_files import fits, read_json_object
from sbeval.hub_names import is_hub_id, local_path

_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors")
_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_MOST_LABELS = 2**20
_OF_WEIGHTS = ("weight", "proj", "bias")
_MASKS = (".attn.bias", "attention.bias", "attention_bias")
_MOST_DIMENSIONS = 3
_FLOATING_POINT = re.compile(r"(F|FLOAT)(16|32|64)$")  # not of a byte, which stand beside their scales


def find_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a checkpoint, downloading it where it is named by its hub id.

    Raises:
        UserError: there is no such folder, or the hub has no such repository or cannot be reached.
    """
    path = local_path(path_or_id)
    if path.is_dir():
        return path
    name = str(path_or_id)
    if not is_hub_id(path_or_id):
        raise UserError(f"Expected a checkpoint folder or a hub id such as owner/name, found nothing at {name!r}")
    texts = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*texts, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*texts, "*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = first_line(error)
        raise UserError(f"no folder {name!r} here, and the hub gave no checkpoint of that name: {reason}") from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the contents of `config.json`.

    Raises:
        UserError: there is none, it cannot be read, or it has so many labels that naming them takes the memory.
    """
    path = folder / "config.json"
    refuse_adapter(folder)
    if not path.is_file():
        raise UserError(f"a checkpoint folder holds a config.json, {folder} has none")
    config = read_json_object(path, "the configuration of a checkpoint", nan=False)
    for section in (config, *config.values()):
        if isinstance(section, dict) and fits(labels := section.get("num_labels", 0), int) and labels > _MOST_LABELS:
            raise UserError(f"Expected at most {_MOST_LABELS} labels in {path}, found num_labels {labels}; mend it")
    return config


def check_weights(folder: Path, config: dict[str, Any] | None = None) -> None:
    """Checks, before transformers loads a folder, that its files are whole and hold as much as its configuration asks.

    Pickles that are no part of an index are transformers' to open: it reads some that `Weights` does not. `config` are
    the contents of `config.json`, where they were read before.

    Raises:
        UserError: a file is missing or damaged, an index is none, or the configuration asks for more than the files
            can hold.
    """
    for name in (*_SAFETENSORS[::-1], *_PICKLES[::-1]):
        if (folder / name).is_file():
            config = config or read_config(folder)
            try:
                weights = Weights(folder)
            except UserError:
                if name != _PICKLES[1]:
                    raise
                size = (folder / name).stat().st_size
                check_sizes(config, tensors=size, weight_bytes=size)
            else:
                weights.check(config)
            return


def held_bytes(folder: Path) -> int:
    """Returns the size of the files in a folder that may hold weights, and of the shards that an index names."""
    files = {*folder.glob("*")}
    for name in (_SAFETENSORS[0], _PICKLES[0]):
        if (folder / name).is_file():
            with contextlib.suppress(UserError):  # who reads it says what is wrong with it
                files |= {folder / shard for shard in _shards(folder / name)}
    return sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".bin") and file.is_file())


class Weights:
    """The tensors of a checkpoint by name, each taken once and checked for its shape."""

    def __init__(self, folder: Path, files: Sequence[str] = (*_SAFETENSORS, *_PICKLES)) -> None:
        """Opens every file of the first of `files` that is there, so that a missing or damaged one is found early.

        Raises:
            UserError: weights are missing, damaged, or not where the index says.
        """
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._pickled: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._taken: set[str] = set()
        for name in files:
            if (folder / name).is_file():
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
                        self._kinds[name] = tensor.get_dtype()
                        self._shapes[name] = tuple(tensor.get_shape())
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
                    raise ValueError("it holds something else than tensors by name")
                self._pickled.update(tensors)
                self._kinds |= {name: str(tensor.dtype).upper() for name, tensor in tensors.items()}
                self._shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                names = set(tensors)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
            raise UserError(
                f"{path} is truncated or damaged ({first_line(error)}); copy it or download it again"
            ) from error
        if absent := (expected or set()) - names:
            raise UserError(f"{path} lacks tensors its index names: {some(absent)}; download it again")
        self._file_of.update(dict.fromkeys(names, path))

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuses a configuration that asks for more than the files can hold, or does not say how they are quantised.

        Masks of attention and positions may be whole numbers or truth values in any checkpoint; weights would be cast.
        """
        size = sum(file.stat().st_size for file in set(self._file_of.values()))
        check_sizes(config, tensors=len(self._file_of), weight_bytes=size)
        whole = () if names_quantisation(config) else {name for name in self._kinds if not self.is_floating_point(name)}
        weights = [name for name in whole if name.endswith(_OF_WEIGHTS) and not f".{name}".endswith(_MASKS)]
        if cast := [name for name in weights if len(self.shape(name)) <= _MOST_DIMENSIONS]:
            raise UserError(
                f"Expected weights in floating point in {self.folder}, whose config.json names no quantisation, found "
                f"whole numbers or truth values in {some(cast)}; save the checkpoint again, with its "
                "quantization_config if it has one"
            )

    def all_in_floating_point(self) -> bool:
        """Returns whether every tensor has numbers in floating point of two bytes or more."""
        return all(map(_FLOATING_POINT.search, self._kinds.values()))

    def is_floating_point(self, name: str) -> bool:
        """Returns whether a tensor has numbers in floating point of any width."""
        return "F" in self._kinds[name]

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return sorted(self._file_of)

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
        self._path(name)
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Returns a tensor of any shape, and does not count it as taken."""
        return self._read(name)

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

    def refuse_left_over(self, layout: str) -> None:
        """Raises a UserError where tensors have no place in a layout."""
        if names := set(self._file_of) - self._taken:
            raise UserError(f"these tensors are no part of the {layout} layout: {some(names)}")

    def check_tied_head(self, embedding: Tensor) -> None:
        """Takes the head of a model whose head is its embedding, if the files hold one all the same.

        Raises:
            UserError: it is another than the embedding.
        """
        if "lm_head.weight" not in self:
            return
        head = self.take("lm_head.weight", tuple(embedding.shape))
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise UserError(
                "Expected lm_head.weight to be the embedding, since tie_word_embeddings is true or absent, found other "
                "numbers; mend the configuration"
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
    """Returns the names of the files that an index of shards names, and of the tensors that each should hold."""
    index = read_json_object(path, "an index of shards", remedy="download it again").get("weight_map")
    if not isinstance(index, dict):
        raise UserError(f"{path} is no index of shards: it holds no weight_map; download it again")
    shards: dict[str, set[str]] = {}
    for tensor, shard in index.items():
        if not isinstance(shard, str) or not _lies_within(shard):
            raise UserError(
                f"{path} is no index of shards: expected the name of a file beside it for {shown(tensor)}, found "
                f"{shown(shard)}; download it again"
            )
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _lies_within(name: str) -> bool:
    """Whether a name means a file in a folder or below it."""
    path = Path(name)
    return path.name != "" and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def some(names: Iterable[str]) -> str:
    """Returns the first three names in order, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
