"""Harder retrieval: needles without a shared word, the n-th of several turns, and LongBench v2 by stratum."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS, evaluated, load_task, prompts

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetLogprobs, resolve_sequence
from sbeval.tasks.recall.questions import QUESTION, associations, load_questions, needle, words
from sbeval.tasks.recall.retrieval import TurnsTask
from tests.marks import exhaustive

LENGTHS = [1500, 4000]


def options_of(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {"tokenizer": str(folder / kind), "context_lengths": LENGTHS, "num_samples": 4, **more}


def test_no_association_shares_a_word_with_its_question() -> None:
    listed = associations(None)[0]
    assert len(listed) >= 30
    assert all(not words(needle("Ada", shown)) & words(QUESTION.format(asked=asked)) for asked, shown in listed.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_person_asked_for_lives_beside_what_the_question_leads_to(folder: Path, kind: str) -> None:
    task = load_task("sb_association", options_of(folder, kind))
    made = prompts(task)
    for number, prompt in enumerate(made):
        lives = dict(re.findall(r"(\w+) lives beside (.+)\.", prompt))
        asked = re.findall(r"visited (.+)\?", prompt)
        assert len(lives) == 4
        assert [name for name, shown in lives.items() if shown == associations(None)[0][asked[0]]] == task.eval_docs[
            number // 2
        ]["references"]
    assert made == prompts(load_task("sb_association", options_of(folder, kind)))
    assert made != prompts(load_task("sb_association", options_of(folder, kind, seed=7)))


@pytest.mark.parametrize("kind", [KINDS[0], *exhaustive(*KINDS[1:])])
def test_the_turn_asked_for_is_the_nth_of_those_that_look_the_same(folder: Path, kind: str) -> None:
    task = load_task("sb_turns", options_of(folder, kind, num_samples=12))
    places = set()
    for number, prompt in enumerate(prompts(task)):
        code, place, request = re.findall(r"write (\w+) and then, .*, reply (\d) of the 4 to: (.+)\.", prompt)[0]
        replies = re.findall(rf"Request: {request}\. Reply: (.+)\n", prompt)
        assert len(set(replies)) == 4
        assert f"{code} {replies[int(place) - 1]}" == task.eval_docs[number // 2]["references"][0]
        places.add(place)
    assert len(places) > 2


def test_turns_are_scored_as_openai_scores_them() -> None:
    score, reference = TurnsTask.score, "aB3 lamp harbor."
    answers = (reference, "lamp harbor.", "aB3 zzz", "aB3 lamp harbour.")
    values = [score(None, answer, [reference]) for answer in answers]  # type: ignore[arg-type]
    assert values[:2] == [1.0, 0.0]
    assert 0 < values[2] < 0.3 < 0.9 < values[3] < 1


class Reads(PartialModel):
    """Finds every answer token certain where the whole answer stands in the text before, else hopeless."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        answers = []
        for inputs, positions, targets in (resolve_sequence(request.args[0]) for request in requests):
            self.seen.append(len(inputs))
            text = ",".join(map(str, inputs[: positions[0]]))
            shown = np.full(len(targets), ",".join(map(str, targets[1:])) in text)
            answers.append(TargetLogprobs(np.where(shown, -0.5, -9.0).astype(np.float32), shown))
        return answers


@pytest.mark.parametrize("name", ["sb_association_forced", "sb_turns_forced"])
def test_another_value_in_the_text_changes_the_answer(folder: Path, name: str) -> None:
    model = Reads()
    found = evaluated(model, [name], options_of(folder, "character"))["results"][name]
    assert max(model.seen) <= LENGTHS[-1]
    for length in LENGTHS:
        assert found[f"exact_match@{length:07d},none"] == 1
        assert found[f"retrieval_gain@{length:07d},none"] > 8
        assert found[f"chance@{length:07d},none"] == pytest.approx(0.25)
        assert found[f"chance_nll@{length:07d},none"] == pytest.approx(math.log(4))


def test_associations_of_a_file_are_asked_for_and_checked(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"shown": f"the tower {name}", "asked": name * 2} for name in "abcd"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = options_of(folder, "character", associations=str(path))
    task = load_task("sb_association", options)
    assert all(re.search(r"visited (aa|bb|cc|dd)\?", prompt) for prompt in prompts(task))
    assert task.task_record.corpus_detail.startswith("associations ")
    with pytest.raises(UserError, match="at most 4 people"):
        load_task("sb_association", {**options, "people": 5})
    path.write_text('{"shown": "a tower in Paris", "asked": "Paris"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"share no word with their question, found \['in', 'paris'\]"):
        load_task("sb_association", options)


class Guesses(PartialModel):
    """Finds the choice right that the end of the text names, and A where there is no text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer, self.seen = tokenizer, []

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        answers = []
        for inputs, _, targets in (resolve_sequence(request.args[0]) for request in requests):
            self.seen.append(self.tokenizer.decode(inputs))
            named = re.search(r"It is (\w)", self.seen[-1])
            logprobs = np.full(len(targets), -5.0, np.float32)
            logprobs["ABCD".index(named[1] if named else "A")] = -0.1
            answers.append(TargetLogprobs(logprobs, logprobs > -1))
        return answers


def test_long_bench_keeps_both_ends_of_a_text_and_asks_again_without_it(folder: Path, corpora: dict[str, Any]) -> None:
    name = "sb_longbench2_short"
    task = load_task(name, options_of(folder, "character", longbench2=corpora["longbench2"]))
    model = Guesses(task.counter.tokenizer)
    options = options_of(folder, "character", longbench2=corpora["longbench2"], num_samples=8)
    found = evaluated(model, [name], options)["results"][name]
    assert [found[f"exact_match@{length:07d},none"] for length in LENGTHS] == [1.0, 1.0]
    assert found["chance@0001500,none"] == 0.25
    assert found["retrieval_gain@0001500,none"] > 0.5
    assert {"<text>" in text for text in model.seen} == {True}
    assert {"It is" in text for text in model.seen} == {True, False}
    assert max(map(len, model.seen)) <= LENGTHS[-1]
    with pytest.raises(UserError, match="This copy of LongBench v2 has no long texts"):
        load_task("sb_longbench2_long", options_of(folder, "character", longbench2=corpora["longbench2"]))


def test_without_a_copy_all_of_lm_eval_s_configurations_are_read_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load(dataset: str, config: str) -> dict[str, list[dict[str, Any]]]:
        asked.append((dataset, config))
        row = {"context": config, "question": "?", "choices": list("abcd"), "answer": 1, "length": "short"}
        return {"train": [row]}

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("sbeval.tasks.ruler.texts.on_hub_or_cached", lambda dataset: None)
    load_questions.cache_clear()
    questions, _, where = load_questions(None)
    load_questions.cache_clear()
    assert {dataset for dataset, _ in asked} == {where} == {"recursal/longbench-v2"}
    assert [entry.text for entry in questions] == [config for _, config in asked]
    assert {"legal_single", "academic_multi"} < {entry.text for entry in questions}
    assert len(asked) == 20


def test_strata_are_those_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    base = {"question": "?", "choices": list("abcd"), "answer": 1}
    rows = [{**base, "context": "w " * count} for count in (10, 40_000, 130_000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [entry.stratum for entry in load_questions(str(path))[0]] == ["short", "medium", "long"]
    path.write_text(json.dumps({**base, "context": "w", "length": "long"}) + "\n", encoding="utf-8")
    assert [(entry.stratum, entry.right) for entry in load_questions(str(path))[0]] == [("long", "B")]
    path.write_text('{"text": "w"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="another layout"):
        load_questions(str(path))
