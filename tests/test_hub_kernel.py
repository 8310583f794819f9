"""The package for the kernels hub has the same source under another name, and follows the hub's rules."""

import ast
import base64
import hashlib
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from source_tree import ROOT

from sbeval.attention import stickbreaking_attention

LAY_OUT = runpy.run_path(str(ROOT / "hub" / "lay_out.py"))["lay_out"]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hub") / "stickbreaking"
    LAY_OUT(folder)
    LAY_OUT(folder)  # again over what is there
    return folder


def load(variant: Path, file: str = "__init__.py") -> ModuleType:
    """Imports a variant as `kernels` does: by its path, under the name in its metadata."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("impl", "dtype"), [("blockwise", torch.float64), ("triton", torch.float32)])
def test_it_gives_the_bits_of_the_package(laid_out: Path, impl: str, dtype: torch.dtype) -> None:
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    inputs = [torch.randn(1, 2, 40, 16, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    module = load(laid_out / "build" / "torch-cpu")
    results = []
    for attention in (module.stickbreaking_attention, stickbreaking_attention):
        output, remainder = attention(*inputs, impl=impl)
        results.append((output, remainder, *torch.autograd.grad(output.sum(), inputs)))
    near = {"rtol": 1e-5, "atol": 1e-6} if device == "cuda" else {"rtol": 0, "atol": 0}  # atomics there
    for mine, others in zip(*results, strict=True):
        torch.testing.assert_close(mine, others, **near)


def test_operators_stand_under_its_own_name(laid_out: Path) -> None:
    module = load(laid_out / "build" / "torch-cpu")
    q = torch.randn(1, 1, 4, 16)
    with torch.profiler.profile() as profiled:
        module.stickbreaking_attention(q, q, q)
    called = {event.key for event in profiled.key_averages() if "stickbreaking" in event.key}
    assert called == {f"{module.__name__}::stickbreaking_blockwise_forward"}


def test_older_readers_find_the_same_names_below_its_name(laid_out: Path) -> None:
    module = load(laid_out / "build" / "torch-cpu")
    below = load(laid_out / "build" / "torch-cpu", "stickbreaking/__init__.py")
    assert {*below.__all__} == {*module.__all__}
    assert all(hasattr(below, name) for name in module.__all__)


def test_every_module_keeps_the_rules_of_the_hub(laid_out: Path) -> None:
    files = sorted((laid_out / "build").rglob("*.py"))
    assert len(files) > 60
    for file in files:
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        assert "sbeval" not in file.read_text(), file
        for node in ast.walk(tree):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                named = [node.module or ""]
            for name in named:
                assert name.partition(".")[0] in {*sys.stdlib_module_names, "torch", "triton"}, (file, name)


def test_metadata_names_every_file_by_its_digest(laid_out: Path) -> None:
    for variant in (laid_out / "build").iterdir():
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        assert variant.name == f"torch-{metadata['backend']['type']}"
        digests = {
            str(file.relative_to(variant)): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
            for file in variant.rglob("*")
            if file.suffix == ".py"
        }
        assert metadata["digest"] == {"algorithm": "sha256", "files": digests}


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("a")
    (tmp_path / "torch-ext" / "stickbreaking").mkdir(parents=True)
    with pytest.raises(FileExistsError, match=f"Expected an empty folder.*found files in {tmp_path}"):
        LAY_OUT(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "a"
