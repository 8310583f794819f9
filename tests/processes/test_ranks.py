"""The launchers of several machines tell each other which error ended the ranks."""

import datetime
import json
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from sbeval.processes import ranks
from sbeval.processes.launch import _why

ADDRESS = "127.0.0.1"
LONGEST_SECONDS = 300


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Returns the store of the first machine's launcher, which waits longer for other machines than a test."""
    monkeypatch.setattr(ranks, "_LOST_SECONDS", 2 * LONGEST_SECONDS)
    timeout = datetime.timedelta(seconds=LONGEST_SECONDS)
    return TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False, timeout=timeout)


def notify(store: TCPStore, sentence: str, *, machine: int = 0) -> Thread:
    """Starts `notify_machines` on one of three machines."""
    options = {"machine": machine, "machines": 3}
    thread = Thread(target=ranks.notify_machines, args=(ADDRESS, store.port, sentence), kwargs=options, daemon=True)
    thread.start()
    return thread


def poll(store: TCPStore) -> None:
    """Records that ranks of all three machines poll the board."""
    for machine in range(3):
        store.set(f"{ranks._POLLS}/{machine}", "")


def ends(launcher: Thread) -> bool:
    launcher.join(LONGEST_SECONDS)
    return not launcher.is_alive()


def test_the_first_launcher_keeps_the_store_until_every_machine_that_polls_has_the_error(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_READ_SECONDS", 0.1)
    poll(store)
    launcher = notify(store, "why")
    assert store.get(ranks._FAILED) == b"why"
    store.set(f"{ranks._REPORTED}/1", "")
    launcher.join(1)
    assert launcher.is_alive()
    store.set(f"{ranks._REPORTED}/2", "")
    assert ends(launcher)


def test_the_first_launcher_does_not_wait_long_for_a_machine_without_a_rank_that_polls(store: TCPStore) -> None:
    assert ends(notify(store, "why"))


def test_another_launcher_reports_its_error_without_waiting_and_keeps_an_earlier_one(store: TCPStore) -> None:
    poll(store)
    store.set(ranks._FAILED, "earlier")
    assert ends(notify(store, "why", machine=1))
    assert store.get(ranks._FAILED) == b"earlier"
    assert store.check([f"{ranks._REPORTED}/1"])


def failure(folder: Path, rank: int, **content: object) -> ProcessFailure:
    file = folder / f"{rank}.json"
    if content:
        file.write_text(json.dumps(content))
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=1, error_file=str(file))


def test_a_launcher_prints_the_earliest_error_that_is_more_than_the_loss_of_the_store(tmp_path: Path) -> None:
    lost = failure(tmp_path, 0, message=ranks.GONE, timestamp=1.0, on_the_board=True)
    late = failure(tmp_path, 1, message="late", timestamp=2.75, on_the_board=True)
    first = failure(tmp_path, 2, message="first", timestamp=2.25, on_the_board=False)
    unknown = failure(tmp_path, 3)
    assert _why({0: lost, 1: late, 2: first, 3: unknown}) == ("first", False)
    assert _why({0: lost, 3: unknown}) == (ranks.GONE, True)
    why, on_the_board = _why({3: unknown})
    assert why.startswith("Rank 3, process 103 on ")
    assert "ended with exit code 1" in why
    assert not on_the_board
