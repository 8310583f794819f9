"""A device that is not there is refused by files alone where they tell, and left to torch where they do not."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from sbeval import devices
from sbeval.devices import check_device_early
from sbeval.errors import UserError


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose torch is built for CUDA, and whose driver's list of GPUs is the folder `gpus`, not there yet."""
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(devices, "find_spec", lambda name: spec)
    monkeypatch.setattr(devices, "_NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(devices, "_OTHER_WAYS", (f"{tmp_path}/dev/*",))
    return tmp_path


def test_no_more_gpus_are_taken_than_the_driver_lists(machine: Path) -> None:
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (machine / "gpus" / gpu).mkdir(parents=True)
    for device in ("cuda", "cuda:1", "cpu", None):
        check_device_early(device)
    with pytest.raises(UserError, match="found 'cuda:2' with 2 cuda devices"):
        check_device_early("cuda:2")


def test_without_any_way_to_a_gpu_there_is_none(machine: Path) -> None:
    with pytest.raises(UserError, match="found 'cuda' with 0 cuda devices"):
        check_device_early("cuda")


def test_a_torch_without_gpus_takes_none_whatever_the_machine_has(machine: Path) -> None:
    (machine / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (machine / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = None\n")
    with pytest.raises(UserError, match="found 'cuda' with 0 cuda devices"):
        check_device_early("cuda")


def test_where_files_do_not_tell_torch_is_asked(machine: Path) -> None:
    (machine / "dev").mkdir()
    (machine / "dev" / "dxg").touch()
    for device in ("cuda:3", "xpu", "npu:1"):
        check_device_early(device)
