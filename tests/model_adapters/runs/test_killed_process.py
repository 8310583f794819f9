"""A process killed without warning, anywhere: the next one goes on and repeats no finished request."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.model import CachingLM
from ranks import start

from sbeval.corpora import Layout, local_corpus, token_key, tokenize_corpus
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.scoring.requests import AttentionSpanRequest, TargetSequence, TokenLogprobsRequest, keep_sequences
from tests.model_adapters.small import Checkpoints, english, instances, load_lm, tiny_tokenizer

pytestmark = pytest.mark.exhaustive

Answers = dict[str, list[Any]]


def asked(text: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Requests by their type; no two windows begin at the same token."""
    corpus = tokenize_corpus(local_corpus(text), tiny_tokenizer(adds_bos=False), Layout())
    lines = [line for line in english().splitlines() if line][:6]
    rng = np.random.default_rng(0)
    sequences = [TargetSequence(rng.integers(3, 300, 30 + i), np.array([7]), np.array([9])) for i in range(4)]
    return {
        "token_logprobs": [TokenLogprobsRequest(token_key(corpus, i, i + 20), 20, 0, 5) for i in range(5)],
        "target_logprobs": list(keep_sequences(sequences)),
        "attention_span": [AttentionSpanRequest(token_key(corpus, i, i + 20), 20, 4) for i in range(3)],
        "loglikelihood": [(line[:9], line[9:]) for line in lines],
        "loglikelihood_rolling": [(line,) for line in lines],
        "generate_until": [(line, {"until": ["e"], "max_gen_toks": 4}) for line in lines],
    }


def answer(lm: StickBreakingLM, database: Path, text: Path) -> Answers:
    """Answers everything, what is in the database already from there."""
    cached = CachingLM(lm, str(database))
    found = {kind: getattr(cached, kind)(instances(kind, arguments)) for kind, arguments in asked(text).items()}
    cached.dbdict.close()
    return found


def load(checkpoint: str | Path) -> StickBreakingLM:
    """Loads the model so that every request is a batch of its own."""
    lm = load_lm(checkpoint, max_batch_tokens=1, batch_size=1)
    lm.session.scorer._comes_apart = True  # leaves out the comparison of a short input, which would count as a run
    return lm


def note_answers(lm: StickBreakingLM, note: Callable[[str], object]) -> None:
    """Calls `note` with the type of each request whose answer the response cache, which sets its hook, has kept."""
    set_hook = lm.set_cache_hook

    def noting(hook: Any) -> None:
        add = hook.add_partial
        hook.add_partial = lambda kind, arguments, result: (add(kind, arguments, result), note(kind))
        set_hook(hook)

    lm.set_cache_hook = noting


def answer_until_killed(checkpoint: Path, database: Path, text: Path, runs: int) -> None:
    """Reports every finished request in one line, and dies."""
    lm = load(checkpoint)
    left = runs

    def dies(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    lm.model.get_input_embeddings().register_forward_hook(dies)
    note_answers(lm, lambda kind: os.write(1, f"finished {kind}\n".encode()))
    answer(lm, database, text)


def numbers(answers: Answers) -> list[float]:
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
    killed = start(answer_until_killed, *arguments, environment=os.environ, folder=tmp_path, log=log)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, log.read_text()[-2000:]
    finished = log.read_text().count("finished")
    everything = sum(map(len, asked(text).values()))
    assert 0 < finished < everything

    lm = load(folder)
    added: list[str] = []
    note_answers(lm, added.append)
    found = answer(lm, database, text)
    assert len(added) == everything - finished

    expected = answer(load(folder), tmp_path / "other.db", text)
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-5)
    assert found["generate_until"] == expected["generate_until"]
