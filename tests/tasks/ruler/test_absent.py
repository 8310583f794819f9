"""Needles that are not there: a program that reads the prompt scores one, and one that invents values is found out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS, Chooser, evaluated, load_task, prompts

from sbeval.errors import UserError
from sbeval.evaluation import run_tasks
from sbeval.reports import load_results
from sbeval.reports.build import assemble
from sbeval.results.records import TaskRecord
from sbeval.tasks.recall.questions import associations
from sbeval.tasks.ruler.absent import is_absent
from tests.marks import exhaustive

GENERATED = ("sb_niah_single_1", "sb_niah_multikey_2", "sb_niah_multiquery", "sb_niah_multivalue", "sb_json_kv")
GENERATED += ("sb_niah_multikey_1", "sb_association", "sb_turns")
FORCED = tuple(f"{name}_forced" for name in GENERATED if name not in ("sb_niah_multiquery", "sb_niah_multivalue"))
LENGTHS = [1600, 4000]


def solved(prompt: str) -> str:
    """Reads the right answer from a prompt of any needle task."""
    if prompt.startswith("{"):
        pairs = json.loads(prompt[: prompt.index("}\n\n") + 1])
        key = re.findall(r"Key: (\S+)", prompt)[-1]
        return str(pairs.get(key, "none"))
    if prompt.startswith("Read this text, which says where"):
        asked = re.findall(r"visited (.+?)\?", prompt)[-1]
        lives = {shown: name for name, shown in re.findall(r"(\w+) lives beside (.+?)\.(?:\s|$)", prompt)}
        return lives.get(associations(None)[0][asked], "none")
    if prompt.startswith("These are requests"):
        asking = r"write (\w+) and then, word for word, reply (\d) of the 4 to: (write a \w+ about the word \w+)\."
        code, place, request = re.findall(asking, prompt)[0]
        replies = re.findall(rf"Request: {request}\. Reply: (.+)\n", prompt)
        return f"{code} {replies[int(place) - 1] if replies else 'none'}"
    question = prompt.rpartition(" mentioned in the provided text? If there is none")[0].rpartition("magic ")[2]
    keys = re.split(r", and |, ", question.partition(" for ")[2])
    found = [v for key in keys for v in re.findall(rf"for {re.escape(key)} is: ([^\n]+?)\.(?:\s|$)", prompt)]
    return ", ".join(found) or "none"


class Solver(PartialModel):
    """Answers what `answer` makes of a prompt and of the right answer to it."""

    def __init__(self, answer: Callable[[str, str], str] = lambda prompt, right: right) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [f" {self.answer(prompt, solved(prompt))}" for prompt, _ in (request.args for request in requests)]


@pytest.fixture
def metadata(folder: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    options = {"context_lengths": LENGTHS, "num_samples": 10, "absent": 0.4}
    return {**corpora, **options, "tokenizer": str(folder / "byte_level_bpe")}


def shares(results: dict[str, Any], task: str, length: int) -> list[float]:
    return [results["results"][task][f"{name}@{length:07d},none"] for name in ("found", "said_absent", "invented")]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.33, 0.5, 0.7, 0.9])
def test_the_first_samples_hold_the_share(share: float) -> None:
    drawn = [is_absent(share, index, "task", 42) for index in range(300)]
    counts = np.cumsum(drawn)
    assert np.abs(counts - share * np.arange(1, 301)).max() < 2
    assert drawn != [is_absent(share, index, "task", 43) for index in range(300)]
    assert not any(is_absent(0.0, index, "task", 42) for index in range(300))
    # depths take turns: none of five may have only samples whose key is there, or only others
    by_depth = np.array(drawn).reshape(-1, 5).mean(axis=0)
    assert ((by_depth > 0) & (by_depth < 1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*GENERATED[:2], *exhaustive(*GENERATED[2:])])
def test_only_the_question_of_a_sample_changes(name: str, kind: str, folder: Path, metadata: dict[str, Any]) -> None:
    options = {**metadata, "tokenizer": str(folder / kind), "context_lengths": [4000]}
    task = load_task(name, options)
    made = prompts(task)
    plain = load_task(name, {**options, "absent": 0.0})
    absent = [doc["absent"] for doc in task.eval_docs]
    assert sum(absent) == 4
    for index, (prompt, is_there_not) in enumerate(zip(made, absent, strict=True)):
        assert '"none"' in prompt
        assert ("none" in solved(prompt)) == is_there_not
        draft, other = (each.generator.draft(index, 4000) for each in (task, plain))
        assert [insert.text for insert in draft.inserts] == [insert.text for insert in other.inserts]
        assert draft.body(40) == other.body(40)
        assert draft.opening == other.opening
        assert (task.eval_docs[index]["depths_percent"] == [[]]) == is_there_not
        if not is_there_not:
            assert task.eval_docs[index]["references"] == list(other.references)
    assert made == prompts(load_task(name, options))


def test_a_program_that_reads_the_prompt_finds_all_and_invents_nothing(metadata: dict[str, Any]) -> None:
    results = evaluated(Solver(), list(GENERATED), metadata)
    for name in GENERATED:
        for length in LENGTHS:
            assert shares(results, name, length) == [1.0, 1.0, 0.0]
        assert not [key for key in results["results"][name] if key.startswith("score@")]


def another(prompt: str, right: str) -> str:
    """Invents a value of the same form for what is not there, and says of what is there that it is not."""
    if "none" not in right:
        return "none"
    if prompt.startswith("{"):
        return "123e4567-e89b-42d3-a456-426614174000"
    if prompt.startswith("Read this"):
        return "It was Noor."
    return right.replace("none", "lamp harbor.") if prompt.startswith("These are") else "7654321"


def test_what_is_invented_is_told_from_what_is_said_to_be_absent(metadata: dict[str, Any]) -> None:
    results = evaluated(Solver(another), list(GENERATED), metadata, limit=5)
    for name in GENERATED:
        found, said_absent, invented = shares(results, name, LENGTHS[0])
        assert (said_absent, invented) == (0.0, 1.0)
        assert found < 0.3  # "none" is a little like a reply of sb_turns
    empty = evaluated(Solver(lambda prompt, right: ""), ["sb_niah_single_1"], metadata)
    assert shares(empty, "sb_niah_single_1", LENGTHS[0]) == [0.0, 0.0, 0.0]
    both = evaluated(Solver(lambda prompt, right: "None is there; 7654321"), ["sb_niah_single_1"], metadata)
    assert shares(both, "sb_niah_single_1", LENGTHS[0]) == [0.0, 0.0, 1.0]


def test_scores_are_those_of_the_logged_samples(metadata: dict[str, Any]) -> None:
    name = "sb_niah_multikey_2"
    results = evaluated(Solver(lambda prompt, right: right if len(prompt) % 3 else "7654321"), [name], metadata)
    record = TaskRecord.from_json(results["configs"][name]["metadata"]["sbeval"])
    assert (record.absent, record.absent_samples) == (0.4, {str(length): 4 for length in LENGTHS})
    for place, length in enumerate(LENGTHS):
        by_presence: dict[bool, list[str]] = {True: [], False: []}
        found = []
        for sample in results["samples"][name]:
            answer, prompt = sample["filtered_resps"][place], sample["arguments"][place][0]
            key = re.findall(r"magic number for (\S+) mentioned", prompt)[0]
            value = re.search(rf"for {key} is: (\d+)\.", prompt)
            by_presence[value is not None].append(answer)
            found += [value[1] in answer] if value else []
        said = [answer == "none" for answer in by_presence[False]]
        invented = [re.search(r"\d{7}", answer) is not None for answer in by_presence[False]]
        assert len(found) == 6
        assert shares(results, name, length) == pytest.approx([np.mean(found), np.mean(said), np.mean(invented)])


@pytest.mark.parametrize("name", [FORCED[0], *exhaustive(*FORCED[1:])])
def test_a_choice_by_log_probability_needs_no_generation(name: str, metadata: dict[str, Any]) -> None:
    def right(answer: str, right_answer: str) -> float:
        return -0.5 if answer in right_answer else -3.0

    results = evaluated(Chooser(metadata["tokenizer"], solved, right), [name], metadata)
    for length in LENGTHS:
        assert shares(results, name, length) == [1.0, 1.0, 0.0]
        margins = [results["results"][name][f"none_margin_{which}@{length:07d},none"] for which in ("there", "absent")]
        assert margins == pytest.approx([-2.5, 2.5])
    never = evaluated(
        Chooser(metadata["tokenizer"], solved, lambda answer, _: -9.0 if answer == "none" else -1.0), [name], metadata
    )
    assert shares(never, name, LENGTHS[0])[1:] == [0.0, 1.0]
    always = evaluated(
        Chooser(metadata["tokenizer"], solved, lambda answer, _: -1.0 if answer == "none" else -9.0), [name], metadata
    )
    assert shares(always, name, LENGTHS[0]) == [0.0, 1.0, 0.0]
    for sample in results["samples"][name]:  # the answers are `none` and values that are in the text
        references = sample["doc"]["references"]
        assert len(sample["arguments"]) % len(LENGTHS) == 0
        assert (references[0].split()[-1] == "none") == sample["doc"]["absent"]


def test_a_choice_has_values_of_other_keys_beside_the_right_one(metadata: dict[str, Any]) -> None:
    for name, least in (("sb_niah_multikey_1_forced", 4), ("sb_niah_multikey_2_forced", 4), ("sb_turns_forced", 4)):
        task = load_task(name, metadata)
        task.build_all_requests(rank=0, world_size=1)
        for doc in task.eval_docs:
            text = task.generator.draft(doc["index"], LENGTHS[0]).body(40)
            values = task.generator.candidates(doc["index"], LENGTHS[0])
            assert len(values) == least
            assert all(value in text for value in values)
            assert (values[0] in doc["references"][0]) == (not doc["absent"])


def test_ranks_without_an_absent_needle_are_refused(metadata: dict[str, Any]) -> None:
    task = load_task("sb_niah_single_1", metadata)
    with pytest.raises(UserError, match="some rank has no sample with an absent needle"):
        task.build_all_requests(rank=0, world_size=10)
    for rank in range(2):
        task.build_all_requests(rank=rank, world_size=2)
    with pytest.raises(UserError, match="number from 0 to below 1, found 1"):
        load_task("sb_niah_single_1", {**metadata, "absent": 1})
    with pytest.raises(UserError, match="leaves no association for absent needles"):
        load_task("sb_association", {**metadata, "people": 32})


@pytest.mark.exhaustive
def test_a_page_shows_what_was_found_and_what_was_invented(metadata: dict[str, Any], tmp_path: Path) -> None:
    tasks = ["sb_niah_single_1", "sb_json_kv"]
    run_tasks(Solver(), tasks, output=str(tmp_path / "good"), metadata={**metadata, "label": "reads"})
    run_tasks(Solver(another), tasks, output=str(tmp_path / "bad"), metadata={**metadata, "label": "invents"})
    results = load_results([tmp_path])
    rows = results.measurements.set_index(["setting", "task", "metric", "context_length_tokens"])
    assert rows.loc[("reads", "sb_json_kv", "found", 4000), "samples"] == 6
    assert rows.loc[("reads", "sb_json_kv", "invented", 4000), "samples"] == 4
    report = assemble(results, baseline=None, publish=lambda spec, stem: (stem, ()), folder=tmp_path)
    assert not [section for section in report.sections if section.identifier == "ruler"]  # RULER asks for no absent key
    (section,) = [section for section in report.sections if section.identifier == "absent"]
    mean, *each = section.figures
    assert "mean over 2 tasks, generated" in mean.caption.title
    assert "invents at 3.9K" not in mean.caption.finding
    assert (
        "invents at 4,000: finds 0% of those there, says of 0% that they are not, invents 100%" in mean.caption.finding
    )
    assert (
        "reads at 4,000: finds 100% of those there, says of 100% that they are not, invents 0%" in mean.caption.finding
    )
    assert len(each) == len(section.tables) == 2
    assert "6 samples a length whose key is there, 4 whose key is not." in each[0].caption.explanation
    (plots,) = [figure.variants["score"]["concat"] for figure in each[:1]]
    assert [plot["title"]["text"] for plot in plots] == [
        "found, if it is there",
        "said to be absent, if it is not there",
        "invented, if it is not there",
    ]
    assert section.tables[0].rows[0].cells[1].interval is not None
    (needles,) = [section for section in report.sections if section.identifier == "needles"]
    assert len(needles.figures) == 2  # the needles that are there, by depth
