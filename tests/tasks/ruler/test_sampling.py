"""What a sample is depends on task, seed and index alone, and a shorter prompt is part of a longer one."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruler_problems import TASKS, load_task, prompts

from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.ruler.drafts import Frame

LENGTHS = [2600, 4000]


@pytest.fixture
def metadata(folder: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    return {**corpora, "tokenizer": str(folder / "byte_level_bpe"), "num_samples": 8}


@pytest.mark.parametrize("name", TASKS)
def test_a_request_does_not_depend_on_other_lengths_samples_tasks_or_global_state(
    name: str, metadata: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = load_task(name, {**metadata, "context_lengths": LENGTHS})
    both.build_all_requests(limit=3, rank=0, world_size=1)
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path))
    random.seed(7)
    np.random.seed(7)
    if name == "sb_ruler_vt":
        prompts(load_task("sb_niah_single_1", {**metadata, "context_lengths": [3000]}), limit=1)
    alone = load_task(name, {**metadata, "context_lengths": LENGTHS[1:], "num_samples": 5})
    alone.build_all_requests(samples=[2], rank=0, world_size=1)
    assert [instance.args for instance in alone.instances] == [both.instances[5].args]  # which a cache goes by


@pytest.mark.parametrize("name", TASKS)
def test_samples_differ_and_the_seed_matters(name: str, metadata: dict[str, Any]) -> None:
    lengths = {"context_lengths": [2600]}
    first = prompts(load_task(name, {**metadata, **lengths}), limit=3)
    assert len(set(first)) == 3
    assert not set(first) & set(prompts(load_task(name, {**metadata, **lengths, "seed": 43}), limit=3))


@pytest.mark.parametrize("name", TASKS)
def test_lengths_share_questions_answers_and_relative_depths(name: str, metadata: dict[str, Any]) -> None:
    task = load_task(name, {**metadata, "context_lengths": LENGTHS})
    task.build_all_requests(limit=4, rank=0, world_size=1)
    for doc in list(task.eval_docs)[:4]:
        short, long = (task.generator.draft(doc["index"], length) for length in LENGTHS)
        assert list(short.references) == list(long.references) == doc["references"]
        assert (short.closing, short.answer_prefix) == (long.closing, long.answer_prefix)
        if "qa" not in name:
            assert doc["depths_percent"][0] == doc["depths_percent"][1]


@pytest.mark.parametrize("name", TASKS)
def test_the_haystack_of_a_shorter_prompt_is_part_of_the_longer_one(name: str, metadata: dict[str, Any]) -> None:
    task = load_task(name, {**metadata, "context_lengths": LENGTHS})
    for index in range(2):
        units = [task.fitted.fitter(length, Frame()).fit([index])[index].units for length in LENGTHS]
        drafts = [task.generator.draft(index, length) for length in LENGTHS]
        assert units[0] < units[1]
        if hasattr(drafts[0], "haystack"):
            short, long = (draft.haystack.text(0, count) for draft, count in zip(drafts, units, strict=True))
            assert long.startswith(short)
        else:
            bodies = [draft.body(count) for draft, count in zip(drafts, units, strict=True)]
            short, long = ([word for word in body.split() if not word[0].isdigit()] for body in bodies)
            remaining = iter(long)
            assert all(word in remaining for word in short), "the shorter list is no subsequence of the longer one"


def test_a_depth_grid_is_gone_through_in_turn(metadata: dict[str, Any]) -> None:
    for name in ("sb_niah_single_1", "sb_niah_multikey_1"):
        task = load_task(name, {**metadata, "context_lengths": [1200, 2000], "depths": 5})
        task.build_all_requests(limit=6, rank=0, world_size=1)
        depths = [doc["depths_percent"] for doc in list(task.eval_docs)[:6]]
        assert depths == [[[percent], [percent]] for percent in (0.0, 25.0, 50.0, 75.0, 100.0, 0.0)]


def test_a_kept_fit_gives_the_same_prompts(metadata: dict[str, Any]) -> None:
    for name in ("sb_niah_multikey_2", "sb_ruler_cwe"):
        first, second = (prompts(load_task(name, {**metadata, "context_lengths": LENGTHS})) for _ in range(2))
        assert first == second


@given(st.integers(1, 300), st.integers(0, 5))
def test_an_order_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(seeded_order(count, "x", seed).tolist()) == list(range(count))


@given(st.sets(st.integers(0, 10**12), min_size=1), st.integers(0, 5))
def test_ranks_of_numbers_do_not_depend_on_the_others(numbers: set[int], seed: int) -> None:
    listed = np.array(sorted(numbers))
    ranks = seeded_ranks(listed, "x", seed)
    assert len(set(ranks.tolist())) == len(numbers)
    assert seeded_ranks(listed[:1], "x", seed)[0] == ranks[0]
