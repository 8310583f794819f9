"""`context_parallel`: processes that share windows and prompts give the log-probabilities and texts of one."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks, start

from sbeval.corpora import Layout, TokenizedCorpus, local_corpus, store, token_key, tokenize_corpus
from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.scoring.requests import TokenLogprobsRequest
from tests.model_adapters.small import english, instances, load_lm, tiny_tokenizer

WINDOWS = [(0, 40, 40), (7, 16, 3), (90, 301, 301), (200, 41, 1), (50, 100, 16), (3, 64, 64), (20, 203, 9)]
PROCESSES = 4
CASES = {  # processes of a group, and the model
    "one group of four": (4, "stickbreaking"),
    "two groups": (2, "stickbreaking"),
    "mixture beside rope": (2, "mixture beside rope"),
    "rope": (2, "rope"),
    "nape asentmax": (2, "nape asentmax"),
}
BATCH_TOKENS = 48
Arguments = list[tuple[Any, ...]]
GENERATED = {  # processes of a group, the model, and what is changed in its configuration
    **{name: (*case, {}) for name, case in CASES.items()},
    "windows of rope": (2, "rope", {"sliding_window": 16}),
    "rope by length": (2, "rope", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "windows of alibi": (2, "rope", {"attention": "alibi", "sliding_window": 16, "rope_parameters": None}),
}
SETTING = {"until": ["\n\n"], "max_gen_toks": 12}
SAMPLED = {**SETTING, "do_sample": True, "temperature": 1.0}
PROMPTS: list[list[tuple[slice, dict[str, Any]]]] = [  # of each process; the second has none
    [(slice(200), SETTING), (slice(10, 330), SETTING), (slice(5, 30), SETTING), (slice(200), SETTING)],
    [],
    [(slice(300, 560), SAMPLED)],
    [(slice(7, 20), SETTING), (slice(100, 500), {**SETTING, "max_gen_toks": 3})],
]
REFUSED = {
    "left over": (3, "stickbreaking", "context_parallel=3 needs a multiple of 3 processes, found 4"),
    "another family": (2, "llama", "found LlamaForCausalLM"),
    "decay along the text": (2, "forgetting", "this model has a decay or token shifts"),
    "several models": (2, "stickbreaking", "The 2 processes of a context_parallel group loaded different models"),
}


def requests_for(arguments: Arguments) -> list[Any]:
    return instances("token_logprobs", arguments)


def load(folder: Path, **options: Any) -> StickBreakingLM:
    return load_lm(folder, max_length=1024, max_batch_tokens=BATCH_TOKENS, **options)


def prompts_of(rank: int) -> list[Any]:
    text = english()
    return instances("generate_until", [(text[part], setting) for part, setting in PROMPTS[rank]])


def generated(lm: StickBreakingLM, rank: int) -> dict[str, Any]:
    """Answers of a process, and how many tokens its model was given at most at once, and in all."""
    widths = [0]
    hook = lm.model.base_model.register_forward_pre_hook(
        lambda module, arguments, keywords: widths.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    before = lm.session.meter.tokens
    torch.manual_seed(rank)
    texts = [*map(str, lm.generate_until(prompts_of(rank), disable_tqdm=True))]
    hook.remove()
    return {"texts": texts, "widest": max(widths), "tokens": lm.session.meter.tokens - before}


def worker(rank: int, folders: dict[str, Path], arguments: Arguments, out: Path) -> None:
    found: dict[str, Any] = {}
    for name, (degree, model) in CASES.items():
        lm = load(folders[model], context_parallel=degree)
        answers = lm.token_logprobs(requests_for(arguments[rank::PROCESSES]), disable_tqdm=True)
        found[name] = [torch.from_numpy(answer.logprobs.copy()) for answer in answers]
        found[f"{name} tokens"] = lm.session.meter.tokens
    for name, (degree, model, changes) in GENERATED.items():
        folder = folders[name if changes else model]
        found[f"{name} generated"] = generated(load(folder, context_parallel=degree), rank)
    for name, (degree, model, _) in REFUSED.items():
        try:
            load(folders["rope" if name == "several models" and rank % 2 else model], context_parallel=degree)
        except UserError as error:
            found[name] = str(error)
    torch.save(found, out / f"{rank}.pt")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> Iterator[Arguments]:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.txt"
    text.write_text(english())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBEVAL_CACHE", str(folder / "tokens"))
        patch.setattr(store, "_open", {})  # tokens that an earlier test opened are not written to this folder
        corpus: TokenizedCorpus = tokenize_corpus(local_corpus(text), tiny_tokenizer(adds_bos=False), Layout())
        yield [
            tuple(TokenLogprobsRequest(token_key(corpus, start, start + length), length, 0, scored))
            for start, length, scored in WINDOWS
        ]


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Checkpoints by the names of models, and of those whose configuration is changed."""
    made = {model: checkpoint(model) for _, model, *_ in (*CASES.values(), *REFUSED.values())}
    for name, (_, model, changes) in GENERATED.items():
        if changes:
            made[name] = tmp_path_factory.mktemp("changed") / "model"
            shutil.copytree(made[model], made[name])
            config = json.loads((made[name] / "config.json").read_text())
            (made[name] / "config.json").write_text(json.dumps({**config, **changes}))
    return made


@pytest.fixture(scope="module")
def found(folders, arguments, tmp_path_factory) -> list[dict[str, Any]]:
    """What each of four processes found, whose requests are every fourth."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(worker, folders, arguments, out, processes=PROCESSES)
    return [torch.load(out / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_windows_scored_together_have_the_log_probabilities_of_one_process(name, found, checkpoint, arguments):
    alone = load(checkpoint(CASES[name][1]))
    for index, answer in enumerate(alone.token_logprobs(requests_for(arguments), disable_tqdm=True)):
        shared = found[index % PROCESSES][name][index // PROCESSES]
        np.testing.assert_allclose(shared, answer.logprobs, rtol=1e-6, atol=2e-6)
    assert sum(each[f"{name} tokens"] for each in found) == alone.session.meter.tokens


@pytest.mark.parametrize("name", GENERATED)
def test_long_prompts_are_read_by_all_processes_of_a_group_and_continued_as_by_one(name, found, folders):
    degree, model, changes = GENERATED[name]
    alone = load(folders[name if changes else model])
    lengths = [[len(alone.tok_encode(request.args[0])) for request in prompts_of(rank)] for rank in range(PROCESSES)]
    for rank, each in enumerate(found):
        expected = generated(alone, rank)
        shared = each[f"{name} generated"]
        assert (shared["texts"], shared["tokens"]) == (expected["texts"], expected["tokens"])
        group = range(rank // degree * degree, rank // degree * degree + degree)
        longest = max(length for member in group for length in lengths[member])
        part = -(-(longest - 1) // (2 * degree)) * 2
        assert shared["widest"] == part > BATCH_TOKENS
    assert len({text for each in found for text in each[f"{name} generated"]["texts"]}) == 6


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_in_every_process(name, found):
    for each in found:
        assert REFUSED[name][2] in each[name]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("rope", {"extrapolation": "log_length"}, "extrapolation=log_length does not work with context_parallel=2"),
        ("stickbreaking", {}, "context_parallel=2 needs a multiple of 2 processes, found 1"),
    ],
)
def test_neither_an_extrapolation_nor_one_process_can_be_shared(model, options, message, checkpoint):
    with pytest.raises(UserError, match=message):
        load(checkpoint(model), context_parallel=2, **options)


def say_what_is_wrong(folder: Path) -> None:
    try:
        load(folder)
    except UserError as error:
        print(error)


def test_a_port_in_use_is_named(checkpoint, tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        processes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment, log = os.environ | processes, tmp_path / "log.txt"
        start(say_what_is_wrong, checkpoint("stickbreaking"), environment=environment, folder=tmp_path, log=log).join()
    assert f"Expected 2 processes to meet at 127.0.0.1:{port}" in log.read_text()
