"""JSON key-value retrieval: the prompt is an object that holds the answer, and who reads it is right."""

import json
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS, evaluated, load_task, prompts

from sbeval.tasks.recall.json_kv import BLOCK_PAIRS, LEAST_PAIR_TOKENS, POOL_PAIRS
from tests.marks import exhaustive


def read(prompt: str) -> tuple[dict[str, str], list[tuple[str, str]], str]:
    """Returns the object, the worked examples and the key that is asked for."""
    text, _, rest = prompt.partition("}")
    pairs = json.JSONDecoder(object_pairs_hook=list).decode(text + "}")
    assert len(pairs) == len({key for key, _ in pairs})
    *shown, asked = (line.removeprefix("Key: ") for line in rest.splitlines() if line.startswith("Key: "))
    examples = [(key, value) for key, _, value in (line.partition(" Value: ") for line in shown)]
    return dict(pairs), examples, asked.removesuffix(" Value:")


@pytest.mark.parametrize("kind", [KINDS[0], *exhaustive(*KINDS[1:])])
def test_the_object_holds_the_answer_and_both_examples(folder: Path, kind: str) -> None:
    options = {"tokenizer": str(folder / kind), "context_lengths": [2000, 6000], "num_samples": 3}
    task = load_task("sb_json_kv", options)
    made = prompts(task)
    for number, prompt in enumerate(made):
        pairs, examples, asked = read(prompt)
        (reference,) = task.eval_docs[number // 2]["references"]
        assert pairs[asked] == reference
        assert len(examples) == 2
        assert all(pairs[key] == value for key, value in examples)
        assert asked not in dict(examples)
        assert prompt.count(reference) == 1
        depth = task.eval_docs[number // 2]["depths_tokens"][number % 2][0]
        before = len(task.counter.tokenizer(prompt[: prompt.index(f'"{asked}"')])["input_ids"])
        assert abs(before - depth) <= 1
    keys = [list(read(prompt)[0]) for prompt in made[:2]]
    assert set(keys[0][:-1]) < set(keys[1])
    assert made == prompts(load_task("sb_json_kv", {**options, "tokenizer": task.counter.tokenizer}))


@pytest.mark.exhaustive
def test_a_longer_length_read_before_changes_no_sample(folder: Path) -> None:
    blocks = LEAST_PAIR_TOKENS * BLOCK_PAIRS
    options = {"tokenizer": str(folder / "byte_level_bpe"), "num_samples": 2, "context_lengths": [3000]}
    short = prompts(load_task("sb_json_kv", options))
    task = load_task("sb_json_kv", options)
    assert task.generator.draft(0, 2 * blocks).most_units == 3 * BLOCK_PAIRS
    assert prompts(task) == short
    assert task.generator.draft(1, 2**21).most_units == POOL_PAIRS


def test_depths_go_through_the_grid(folder: Path) -> None:
    options = {"tokenizer": str(folder / "character"), "context_lengths": [9000], "num_samples": 3, "depths": 3}
    task = load_task("sb_json_kv", options)
    places = []
    for prompt in prompts(task):
        pairs, _, asked = read(prompt)
        places.append(list(pairs).index(asked) / len(pairs))
    assert places == pytest.approx([0.0, 0.5, 1.0], abs=0.05)
    assert [doc["depths_percent"][0][0] for doc in task.eval_docs] == [0.0, 50.0, 100.0]


class Reads(PartialModel):
    """Looks the key up in the object."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        found = [read(request.args[0]) for request in requests]
        return [f" {pairs[asked]}\nKey: another" for pairs, _, asked in found]


def test_a_model_that_reads_the_object_is_right(folder: Path) -> None:
    options = {"tokenizer": str(folder / "character"), "context_lengths": [2000, 8000], "num_samples": 4}
    scores = evaluated(Reads(), ["sb_json_kv"], options)["results"]["sb_json_kv"]
    assert [scores[f"score@{length:07d},none"] for length in (2000, 8000)] == [1.0, 1.0]


def test_scripts_that_lack_the_task_are_neither_used_nor_recorded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"tokenizer": str(folder / "character"), "context_lengths": [2000], "num_samples": 2}
    plain, asked = (load_task("sb_json_kv", {**options, **more}) for more in ({}, {"scripts": "nvidia"}))
    assert prompts(asked) == prompts(plain)
    assert asked.task_record.scripts is None
    assert "sb_json_kv: NVIDIA's scripts do not have this task" in caplog.text
