"""The garbage collector is paused while a command imports its packages and when it exits, and runs in between."""

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus_problems import tiny_gpt2, tiny_tokenizer, write_folder
from fresh_process import run_code
from lm_eval.api import registry

from sbeval.commands.cli import check_run
from sbeval.harness.run import run
from sbeval.processes.garbage import collections_paused

CYCLE = """
import atexit, gc
from sbeval.processes import garbage
class Loud:
    def __init__(self, name):
        self.name, self.me = name, self
    def __del__(self):
        print(self.name)
"""


def test_no_collection_runs_inside_and_all_run_again_behind_the_context() -> None:
    body = """
with garbage.collections_paused():
    assert not gc.isenabled()
    Loud("a cycle of the imports")
    import wave
assert gc.isenabled()
Loud("a cycle of the run")
gc.collect()
print("collected")
import os
os._exit(0)
"""
    assert run_code("import functools; print = functools.partial(print, flush=True)" + CYCLE + body) == [
        "a cycle of the run",
        "collected",
    ]


def test_without_an_import_everything_is_collected_later() -> None:
    body = """
with garbage.collections_paused():
    Loud("a model of an earlier run")
gc.collect()
print("collected")
"""
    assert run_code(CYCLE + body) == ["a model of an earlier run", "collected"]


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collections_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_switches_the_collector_on_again() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="an import failed"), collections_paused():
        raise ValueError("an import failed")
    assert gc.isenabled()


def test_at_exit_functions_run_and_temporary_folders_are_removed_but_no_cycle_is_collected() -> None:
    body = """
garbage.skip_collections_at_exit()
import tempfile
folder = tempfile.TemporaryDirectory()
print(folder.name)
atexit.register(print, "registered")
Loud("a cycle")
"""
    folder, *lines = run_code(CYCLE + body)
    assert lines == ["registered"]
    assert not Path(folder).exists()
    assert run_code(CYCLE + body.replace("garbage.skip_collections_at_exit()", ""))[1:] == ["registered", "a cycle"]


MODEL_MODULE = """
import gc
from sbeval.model_adapters.lm import StickBreakingLM
collector_is_on = [gc.isenabled()]
class Model(StickBreakingLM):
    def __init__(self, pretrained, fails=False, **options):
        collector_is_on.append(gc.isenabled())
        if fails:
            raise LookupError("the model does not load")
        super().__init__(pretrained, **options)
"""


@pytest.fixture
def model_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name at lm-eval of a model whose class is in a module that is not imported yet."""
    name = "model_of_test_garbage"
    (tmp_path / f"{name}.py").write_text(MODEL_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    registry.model_registry.register(name, target=f"{name}:Model")
    yield name
    del registry.model_registry._objs[name]
    registry._materialise_placeholder.cache_clear()
    sys.modules.pop(name)


@pytest.mark.parametrize("fails", [False, True], ids=["a run", "a model that fails"])
def test_a_run_imports_its_model_without_collections_and_builds_it_with_them(
    fails: bool, model_name: str, tmp_path: Path
) -> None:
    checkpoint = tiny_gpt2(tmp_path / "model", positions=128)
    tiny_tokenizer().save_pretrained(checkpoint)
    text = write_folder(tmp_path / "text", [80] * 3)
    metadata = json.dumps({"data_path": str(text), "context_lengths": [16]})
    arguments = ["--model", model_name, "--model_args", f"pretrained={checkpoint},fails={fails}", "--device", "cpu"]
    arguments += ["--tasks", "sb_text_stream", "--metadata", metadata, "--limit", "2"]
    get_model = registry.get_model
    assert gc.isenabled()
    if fails:
        with pytest.raises(LookupError, match="the model does not load"):
            run(arguments, check_run)
    else:
        run(arguments, check_run)
    assert sys.modules[model_name].collector_is_on == [False, True]
    assert gc.isenabled()
    assert registry.get_model is get_model


def test_a_model_that_cannot_be_imported_leaves_the_collector_on(tmp_path: Path) -> None:
    get_model = registry.get_model
    arguments = ["--model", "no_such_model", "--model_args", "pretrained=x", "--tasks", "sb_copy"]
    with pytest.raises(ValueError, match="no model for this name found"):
        run(arguments, check_run)
    assert gc.isenabled()
    assert registry.get_model is get_model
