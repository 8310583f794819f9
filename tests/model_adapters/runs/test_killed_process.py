"""A process killed without warning, anywhere: the next one goes on and repeats no finished request."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from ranks import start

from tests.model_adapters.runs import answer_until_killed
from tests.model_adapters.small import Checkpoints, english


def numbers(answers: answer_until_killed.Answers) -> list[float]:
    """Every number in the answers of scoring requests, in order."""
    found: list[float] = []
    for kind, values in answers.items():
        if kind != "generate_until":
            for value in values:
                found += np.ravel(getattr(value, "logprobs", value)).astype(float).tolist()
    return found


@pytest.mark.parametrize("runs", [8, 29], ids=["in-our-own-requests", "in-generation"])
def test_the_next_run_repeats_no_finished_request(
    runs: int, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "tokens"))
    text, database, folder = tmp_path / "text.txt", tmp_path / "cache.db", checkpoint("stickbreaking")
    text.write_text(english())
    arguments, log = (folder, database, text, runs), tmp_path / "log.txt"
    killed = start(answer_until_killed.main, *arguments, environment=os.environ, folder=tmp_path, log=log)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, log.read_text()[-2000:]
    finished = log.read_text().count("finished")
    everything = sum(map(len, answer_until_killed.asked(text).values()))
    assert 0 < finished < everything

    lm = answer_until_killed.load(folder)
    added: list[str] = []
    answer_until_killed.note_answers(lm, added.append)
    found = answer_until_killed.answer(lm, database, text)
    assert len(added) == everything - finished

    expected = answer_until_killed.answer(answer_until_killed.load(folder), tmp_path / "other.db", text)
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-5)
    assert found["generate_until"] == expected["generate_until"]
