"""Triton's files are hashed in a thread, whose faults nobody sees and for which nobody waits."""

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from corpus_problems import tiny_gpt2, tiny_tokenizer
from fresh_process import run_code

from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.model_adapters.open import hf
from sbeval.processes.triton_hash import hash_triton_early


@pytest.fixture
def cache() -> Iterator[ModuleType]:
    """Triton's module with `triton_key`, before that is called in this process."""
    module = importlib.import_module("triton.runtime.cache")
    module.triton_key.cache_clear()
    yield module
    module.triton_key.cache_clear()


def test_triton_finds_the_hash_that_it_would_compute(cache: ModuleType) -> None:
    thread = hash_triton_early("cuda")
    assert thread is not None
    thread.join()
    assert cache.triton_key.cache_info()[:2] == (0, 1)  # hits, misses
    assert cache.triton_key() == cache.triton_key.__wrapped__()
    assert cache.triton_key.cache_info()[:2] == (1, 1)
    assert cache.get_cache_key.__globals__["triton_key"] is cache.triton_key  # which the keys of kernels contain


def test_nothing_is_hashed_for_a_model_on_a_cpu(cache: ModuleType) -> None:
    assert hash_triton_early("cpu") is None
    assert cache.triton_key.cache_info().misses == 0


def test_a_model_passes_its_device_before_its_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gpt2(tmp_path, positions=32)
    tiny_tokenizer().save_pretrained(tmp_path)
    steps: list[str] = []
    load = hf.checkpoints.load_whole
    monkeypatch.setattr(hf, "hash_triton_early", steps.append)
    monkeypatch.setattr(hf.checkpoints, "load_whole", lambda *args, **kw: steps.append("weights") or load(*args, **kw))
    StickBreakingLM(str(tmp_path), device="cpu")
    assert steps == ["cpu", "weights"]


@pytest.mark.parametrize("error", [OSError("no such file"), MemoryError(), SystemExit(3), None], ids=repr)
def test_a_failure_is_ignored(
    error: BaseException | None, cache: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        assert error is not None
        raise error

    faults: list[Any] = []
    with monkeypatch.context() as patch:
        if error is None:  # another release of Triton, without this function
            patch.delattr(cache, "triton_key")
        else:
            patch.setattr(cache, "triton_key", fail)
        patch.setattr(threading, "excepthook", faults.append)
        thread = hash_triton_early("cuda")
        assert thread is not None
        thread.join()
    assert faults == []
    assert capfd.readouterr() == ("", "")


def test_without_triton_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.runtime.cache", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert hash_triton_early("cuda") is None


def test_a_process_ends_while_the_files_are_being_hashed() -> None:
    code = """
import threading
from triton.runtime import cache
from sbeval.processes.triton_hash import hash_triton_early
began = threading.Event()
def triton_key():
    began.set()
    threading.Event().wait()
cache.triton_key = triton_key
thread = hash_triton_early("cuda")
began.wait()
print(thread.is_alive())
"""
    assert run_code(code) == ["True"]
