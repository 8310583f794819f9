"""The garbage collector rests while a command imports its packages and when it exits, and works in between."""

import gc
from pathlib import Path

from fresh_process import run_code

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
    try:
        with collections_paused():
            raise ValueError
    except ValueError:
        assert gc.isenabled()


def test_at_exit_functions_run_and_temporary_folders_are_removed_but_no_cycle_is_looked_for() -> None:
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
