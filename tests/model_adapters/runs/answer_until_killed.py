"""Answers requests of every type with a response cache, and kills itself when the model is run for the n-th time."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import CachingLM

from sbeval.corpora import Layout, local_corpus, token_key, tokenize_corpus
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.scoring.requests import AttentionSpanRequest, TargetSequence, TokenLogprobsRequest, keep_sequences
from tests.model_adapters.small import english, instances, load_lm, tiny_tokenizer

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


def main(checkpoint: Path, database: Path, text: Path, runs: int) -> None:
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
