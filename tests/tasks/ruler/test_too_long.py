"""Samples that do not fit a length are left out or cut, counted by task and length, and no line joins other samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import evaluated, load_task, prompts

from sbeval.errors import UserError
from sbeval.evaluation import run_tasks
from sbeval.reports import load_results
from sbeval.reports.build import assemble
from sbeval.results.records import TaskRecord
from sbeval.results.terminal import compact_table
from sbeval.scoring.requests import TargetLogprobs, resolve_sequence
from sbeval.tasks.recall.questions import load_questions
from tests.marks import exhaustive

QA = "sb_ruler_qa_squad"


class Years(PartialModel):
    """Answers the questions of the tests' SQuAD with the year in the prompt, every third time with nothing."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for prompt, _ in (request.args for request in requests):
            town = prompt.rpartition("When was town ")[2].partition(" founded")[0]
            year = prompt.partition(f"Town {town} was founded in ")[2][:4]
            answers.append(year if int(town[-1]) % 3 else "")
        return answers


class Scores(PartialModel):
    """Gives every target the same log-probability."""

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        counts = [len(resolve_sequence(request.args[0])[2]) for request in requests]
        return [TargetLogprobs(np.full(count, -1.0), np.full(count, True)) for count in counts]


@pytest.fixture
def metadata(folder: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    return {**corpora, "num_samples": 20, "tokenizer": str(folder / "byte_level_bpe")}


def needed(task: Any) -> list[int]:
    """The context length that each sample's prompt, written out with its fewest units, needs."""
    from sbeval.tasks.ruler.drafts import Frame, prompt_text

    drafts = [task.generator.draft(index, 3000) for index in range(task.num_samples)]
    texts = [prompt_text(draft, draft.least_units, Frame()) for draft in drafts]
    return [len(task.counter.tokenizer(text)["input_ids"]) + task.generated_tokens for text in texts]


@pytest.fixture
def lengths(metadata: dict[str, Any]) -> list[int]:
    """Three lengths: one that some samples fit, one that more fit, and one that all fit."""
    each = sorted(needed(load_task(QA, {**metadata, "context_lengths": [3000]})))
    assert each[0] < each[10] < each[-1] < 3000
    return [each[5], each[15], 3000]


def test_samples_that_do_not_fit_are_left_out_and_counted(metadata: dict[str, Any], lengths: list[int]) -> None:
    options = {**metadata, "context_lengths": lengths, "too_long": "leave_out"}
    each = needed(load_task(QA, options))
    results = evaluated(Years(), [QA], options)
    record = TaskRecord.from_json(results["configs"][QA]["metadata"]["sbeval"])
    fitting = {length: [index for index, tokens in enumerate(each) if tokens <= length] for length in lengths}
    assert len(fitting[lengths[0]]) < len(fitting[lengths[1]]) < 20 == len(fitting[3000])
    assert record.too_long == "leave_out"
    assert record.fitting_samples == {str(length): len(indices) for length, indices in fitting.items()}
    assert record.left_out_samples == {str(length): 20 - len(indices) for length, indices in fitting.items()}
    assert record.samples_sha256 is not None
    assert list(record.samples_sha256) == [str(length) for length in lengths[:2]]  # at the last, none was left out
    assert len(set(record.samples_sha256.values())) == 2
    samples = results["samples"][QA]
    for length, indices in fitting.items():
        key = f"score@{length:07d}"
        scores = {sample["doc"]["index"]: sample[key] for sample in samples if key in sample}
        assert sorted(scores) == indices
        assert results["results"][QA][f"{key},none"] == pytest.approx(sum(scores.values()) / len(indices))
        for sample in samples:
            assert (length in sample["doc"]["lengths"]) == (sample["doc"]["index"] in indices)
    # a sample that fits has the same prompt whatever becomes of others
    plain = load_task(QA, {**options, "too_long": "refuse", "context_lengths": [3000]})
    assert {s["arguments"][-1][0] for s in samples} == set(prompts(plain))


def test_the_limit_counts_samples_that_fit_somewhere(metadata: dict[str, Any], lengths: list[int]) -> None:
    options = {**metadata, "context_lengths": lengths[:2], "too_long": "leave_out"}
    task = load_task(QA, options)
    each = needed(task)
    somewhere = [index for index, tokens in enumerate(each) if tokens <= lengths[1]]
    task.build_all_requests(limit=4, rank=0, world_size=1)
    assert sorted({instance.doc["index"] for instance in task.instances}) == somewhere[:4]
    considered = range(somewhere[3] + 1)
    left_out = [sum(each[index] > length for index in considered) for length in lengths[:2]]
    assert list(task.task_record.left_out_samples.values()) == left_out
    for index in set(range(20)) - set(somewhere):  # a sample that is chosen by its number is another one nowhere
        with pytest.raises(UserError, match=f"Sample {index} of {QA} fits none of the lengths"):
            task.build_all_requests(samples=[index], rank=0, world_size=1)


@pytest.mark.parametrize("too_long", ["leave_out", "truncate"])
def test_scripts_are_refused_where_the_first_sample_does_not_fit(metadata: dict[str, Any], too_long: str) -> None:
    options = {**metadata, "scripts": "nvidia", "too_long": too_long}
    first = needed(load_task(QA, {**options, "context_lengths": [3000]}))[0]
    with pytest.raises(UserError, match=f"does not fit {first - 1} tokens: remove that length, or scripts"):
        prompts(load_task(QA, {**options, "context_lengths": [first - 1]}))
    assert prompts(load_task(QA, {**options, "context_lengths": [3000]}))


def test_every_rank_counts_the_samples_of_all(metadata: dict[str, Any], lengths: list[int]) -> None:
    options = {**metadata, "context_lengths": lengths, "too_long": "leave_out"}
    tasks = [load_task(QA, options) for _ in range(2)]
    for rank, task in enumerate(tasks):
        task.build_all_requests(rank=rank, world_size=2)
    assert tasks[0].task_record == tasks[1].task_record
    instances = [instance for task in tasks for instance in task.instances]
    assert len(instances) == sum(tasks[0].task_record.fitting_samples.values())
    with pytest.raises(UserError, match=r"none of the samples of rank \d+ fits \d+ tokens: use fewer processes"):
        tasks[0].build_all_requests(rank=0, world_size=20)


def test_a_length_longer_than_the_model_is_left_out_too(metadata: dict[str, Any], lengths: list[int]) -> None:
    options = {**metadata, "context_lengths": [*lengths, 5000], "max_length": 3000}
    with pytest.raises(UserError, match="5000 tokens, only up to 3000"):
        load_task(QA, options)
    task = load_task(QA, {**options, "too_long": "leave_out"})
    assert (task.lengths, task.record().dropped_lengths) == (tuple(lengths), [5000])
    with pytest.raises(UserError, match="5000 tokens, only up to 3000"):
        load_task(QA, {**options, "too_long": "truncate"})


def test_scored_answers_are_left_out_alike(folder: Path, metadata: dict[str, Any]) -> None:
    name = "sb_association_forced"
    options = {**metadata, "tokenizer": str(folder / "character"), "context_lengths": [3000]}
    each = needed(load_task(name, options))
    options |= {"context_lengths": [sorted(each)[10], 3000], "too_long": "leave_out"}
    results = evaluated(Scores(), [name], options)
    record = results["configs"][name]["metadata"]["sbeval"]
    short = sum(tokens <= sorted(each)[10] for tokens in each)
    assert 0 < short < 20
    assert list(record["fitting_samples"].values()) == [short, 20]
    for sample in results["samples"][name]:
        assert len(sample["arguments"]) == 2 * len(sample["doc"]["lengths"])
        assert len([key for key in sample["metrics"] if key.startswith("exact_match")]) == len(sample["doc"]["lengths"])


def test_a_text_that_does_not_fit_loses_its_middle(metadata: dict[str, Any], lengths: list[int]) -> None:
    options = {**metadata, "context_lengths": [lengths[0]]}
    task = load_task(QA, {**options, "too_long": "truncate"})
    each = needed(task)
    cut = prompts(task)
    assert task.task_record.cut_samples == {str(lengths[0]): sum(tokens > lengths[0] for tokens in each)}
    whole = prompts(load_task(QA, {**metadata, "context_lengths": [3000]}))
    for index, prompt in enumerate(cut):
        tokens = task.counter.tokenizer(prompt)["input_ids"]
        assert len(tokens) + task.generated_tokens <= lengths[0]
        assert prompt[:60] == whole[index][:60]  # the instruction
        assert prompt[-60:] == whole[index][-60:]  # the question
        document = task.generator.draft(index, 3000).body(1)
        is_cut = each[index] > lengths[0]
        assert (document in prompt) == (not is_cut)
        removed = task.eval_docs[index]["cut_tokens"][0]
        assert (removed > 0) == is_cut
        if is_cut:  # no more than needed is removed
            assert lengths[0] - 3 <= len(tokens) + task.generated_tokens
            body = prompt.removeprefix("".join(task.generator.draft(index, 3000).opening))
            assert document.startswith(body[:20])
    too_short = min(each) // 3
    with pytest.raises(UserError, match="needs at least"):
        load_task(QA, {**options, "context_lengths": [too_short], "too_long": "truncate"})


@pytest.mark.parametrize("too_long", ["truncate", *exhaustive("leave_out", "refuse")])
def test_questions_on_long_texts_are_cut_unless_told_otherwise(too_long: str, metadata: dict[str, Any]) -> None:
    name = "sb_longbench2_short"
    options = {**metadata, "num_samples": 60, "context_lengths": [2000, 8000]}
    task = load_task(name, options if too_long == "truncate" else {**options, "too_long": too_long})
    texts = {entry.question: entry.text for entry in load_questions(metadata["longbench2"])[0]}
    task.build_all_requests(rank=0, world_size=1)
    record = task.task_record
    if too_long == "refuse":
        assert (record.lengths, record.dropped_lengths) == ([8000], [2000])
        return
    counts = []
    for index in range(60):
        draft = task.generator.draft(index, 2000)
        (text,) = [text for question, text in texts.items() if question in draft.closing]
        whole = "".join(draft.opening) + text + draft.closing + " Answer:"
        counts.append(len(task.counter.tokenizer(whole)["input_ids"]) + task.generated_tokens)
    over = sum(tokens > 2000 for tokens in counts)
    assert 0 < over < 60
    field = record.cut_samples if too_long == "truncate" else record.left_out_samples
    assert field == {"2000": over, "8000": 0}


def report_of(folder: Path) -> Any:
    results = load_results([folder])
    return assemble(results, baseline=None, publish=lambda spec, stem: (stem, ()), folder=folder)


def broken(spec: Any) -> bool:
    """Whether a line of a figure has a gap."""
    points = spec["data"]["values"]
    return any(point["y"] is None for point in points)


@pytest.mark.exhaustive
def test_a_page_counts_them_and_joins_no_other_samples(
    metadata: dict[str, Any], lengths: list[int], tmp_path: Path
) -> None:
    options = {**metadata, "context_lengths": [*lengths, 3500]}
    for name, more in (("all", {}), ("left", {"too_long": "leave_out"}), ("cut", {"too_long": "truncate"})):
        run_tasks(Years(), [QA], output=str(tmp_path / name), metadata={**options, **more, "label": name})
    rows = load_results([tmp_path / "left"]).measurements
    rows = rows[rows["metric"] == "score"].set_index("context_length_tokens")
    assert rows["left_out_samples"].tolist()[2:] == [0, 0]
    assert (rows["samples"] + rows["left_out_samples"]).tolist() == [20] * 4
    report = report_of(tmp_path / "left")
    (ruler,) = [section for section in report.sections if section.identifier == "ruler"]
    figure = ruler.figures[0]
    left = int(rows["left_out_samples"].iloc[0])
    assert f"Left out, since they do not fit: {left} of 20 at {lengths[0]:,}, " in figure.caption.explanation
    assert "Lines are not joined between lengths at which other samples were left." in figure.caption.explanation
    points = figure.variants["score"]["data"]["values"]
    assert [point["y"] is None for point in sorted(points, key=lambda point: point["x"])] == [
        *(False, True, False, True, False, False)  # the last two lengths have the same samples
    ]
    (fitting,) = [section for section in report.sections if section.identifier == "fitting"]
    (table,) = fitting.tables
    assert [cell.text for cell in table.header] == ["model and task", "context", "samples", "left out", "cut"]
    assert [row.cells[3].text for row in table.rows] == [str(count) for count in rows["left_out_samples"]]
    (scores,) = [table for table in ruler.tables if table.stem == "ruler-tasks"]
    assert scores.rows[0].cells[1].small == (f"{left} left out",)
    assert "other samples were left at other lengths" in {
        text for table in ruler.tables for row in table.rows for cell in row.cells for text in cell.small
    }
    assert report.numbers.empty  # one number a curve would join its lengths
    cut = report_of(tmp_path / "cut")
    (ruler,) = [section for section in cut.sections if section.identifier == "ruler"]
    assert f"Cut to fit: {left} of 20 at" in ruler.figures[0].caption.explanation
    assert not broken(ruler.figures[0].variants["score"])
    assert not [section for section in report_of(tmp_path / "all").sections if section.identifier == "fitting"]


def test_the_printed_table_counts_them(metadata: dict[str, Any], lengths: list[int]) -> None:
    options = {**metadata, "context_lengths": lengths, "too_long": "leave_out"}
    results = json.loads(json.dumps(evaluated(Years(), [QA], options), default=str))
    text = compact_table(results, lambda rest: "")
    counts = results["configs"][QA]["metadata"]["sbeval"]["left_out_samples"]
    (line,) = [line for line in text.splitlines() if line.startswith(f"{QA}, left out")]
    assert line.split()[-3:] == [str(count) for count in counts.values()]
    plain = json.loads(json.dumps(evaluated(Years(), [QA], {**metadata, "context_lengths": [3000]}), default=str))
    assert "do not fit" not in compact_table(plain, lambda rest: "")
