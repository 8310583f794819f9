"""Tallies: a program that reads the prompt counts all labels; scores and chance are those of the logged samples."""

import re
from collections import Counter
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
from sbeval.scoring.requests import TargetLogprobs, resolve_sequence
from sbeval.tasks.recall.tallies import LABELS, best_guess, count_in, label_in
from tests.marks import exhaustive

QUESTIONS = ("count", "most", "compare")
LENGTHS = [2500, 5000]
SAMPLES = 12
BEST_CONSTANT = 7
"""The count from 1 to 15 with the smallest relative error on average, if each is right equally often."""


def solved(prompt: str) -> str:
    """Counts the labels in a prompt and answers its question."""
    counts = Counter(re.findall(r"has the label (\w+)\.(?:\s|$)", prompt))
    if asked := re.search(r"How many things in the text have the label (\w+)\?", prompt):
        return str(counts[asked[1]])
    if pair := re.search(r"Which label do more things in the text have, (\w+) or (\w+)\?", prompt):
        return max(pair.groups(), key=lambda label: counts[label])
    ((most, count), (_, second), *_) = counts.most_common()
    assert count > second
    return str(most)


class Solver(PartialModel):
    """Answers what `answer` makes of the right answer to a prompt."""

    def __init__(self, answer: Callable[[str], str] = lambda right: right) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [f" {self.answer(solved(request.args[0]))}" for request in requests]


class Speller(Chooser):
    """Predicts the right answer character by character, and that no letter or digit follows it."""

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        answers = []
        for request in requests:
            inputs, positions, targets = resolve_sequence(request.args[0])
            right = f" {solved(self.tokenizer.decode(inputs[: positions[0] + 1]))}"
            text = self.tokenizer.decode(targets)
            assert len(text) == len(targets)
            is_likely = [
                right.startswith(text[: place + 1]) or (text[:place] == right and not text[place].isalnum())
                for place in range(len(text))
            ]
            answers.append(TargetLogprobs(np.log(np.where(is_likely, 0.9, 0.01)), np.array(is_likely)))
        return answers


@pytest.fixture
def metadata(folder: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    return {"context_lengths": LENGTHS, "num_samples": SAMPLES, "tokenizer": str(folder / "byte_level_bpe")}


def value(results: dict[str, Any], task: str, metric: str, length: int) -> float:
    return float(results["results"][task][f"{metric}@{length:07d},none"])


@pytest.mark.parametrize("kind", exhaustive(*KINDS))
def test_a_sample_has_the_same_answer_at_every_length(folder: Path, kind: str, metadata: dict[str, Any]) -> None:
    lengths = [length * (4 if kind == "character" else 1) for length in LENGTHS]
    options = {**metadata, "tokenizer": str(folder / kind), "context_lengths": lengths}
    labelled: dict[str, list[list[str]]] = {}
    for question in QUESTIONS:
        task = load_task(f"sb_tally_{question}", options)
        made = prompts(task)
        assert len(made) == SAMPLES * len(lengths)
        labelled[question] = [re.findall(r".* has the label .*\n", prompt) for prompt in made]
        for number, prompt in enumerate(made):
            assert [solved(prompt)] == task.eval_docs[number // 2]["references"]
            assert len(labelled[question][number]) == 32
        assert labelled[question][0::2] == labelled[question][1::2]
        budgets = np.array([doc["prompt_tokens"] for doc in task.eval_docs]) + task.generated_tokens
        assert (budgets <= lengths).all()
        longest_line = max(
            len(task.counter.encode([line], special_tokens=False)[0]) for line in made[0].splitlines(True)[1:9]
        )
        assert (budgets > np.array(lengths) - 2 * longest_line).all()
        assert made == prompts(load_task(f"sb_tally_{question}", options))
        assert made != prompts(load_task(f"sb_tally_{question}", {**options, "seed": 7}))
    assert labelled["count"] == labelled["most"] == labelled["compare"]


def test_a_program_that_reads_the_prompt_scores_one(metadata: dict[str, Any]) -> None:
    tasks = [f"sb_tally_{question}" for question in QUESTIONS]
    results = evaluated(Solver(), ["sb_tally"], metadata)
    wordy = evaluated(Solver(lambda right: f"The answer is {right}, not 99 or gray."), ["sb_tally"], metadata)
    for length in LENGTHS:
        assert [value(results, task, "score", length) for task in tasks] == [1.0] * 3
        assert [value(wordy, task, "score", length) for task in tasks] == [1.0] * 3
        assert [value(results, task, "chance", length) for task in tasks] == pytest.approx([1 / 15, 1 / 4, 1 / 2])
        assert value(results, tasks[0], "relative_error", length) == 0
    silent = evaluated(Solver(lambda right: ""), ["sb_tally"], metadata)
    assert [value(silent, task, "score", LENGTHS[0]) for task in tasks] == [0.0] * 3
    assert value(silent, tasks[0], "relative_error", LENGTHS[0]) == 1


def test_scores_and_errors_are_those_of_the_logged_samples(metadata: dict[str, Any]) -> None:
    name = "sb_tally_count"
    wrong = {"1": "9", "2": "two", "3": "3 or 4", "5": "About 1,000.", "7": "6", "9": "12"}
    results = evaluated(Solver(lambda right: wrong.get(right, right)), [name], {**metadata, "num_samples": 40})
    scores, errors, guesses = [], [], []
    for sample in results["samples"][name]:
        right = int(solved(sample["arguments"][0][0]))
        answer = sample["filtered_resps"][0].replace(",", "")
        numbers = [int(number) for number in re.findall(r"\d+", answer)]
        scores.append(numbers[:1] == [right])
        errors.append(min(1.0, abs(numbers[0] - right) / right) if numbers else 1.0)
        guesses.append(min(1.0, abs(BEST_CONSTANT - right) / right))
    assert 0 < np.mean(scores) < 1
    assert value(results, name, "score", LENGTHS[0]) == pytest.approx(np.mean(scores))
    assert value(results, name, "relative_error", LENGTHS[0]) == pytest.approx(np.mean(errors))
    assert value(results, name, "chance_relative_error", LENGTHS[0]) == pytest.approx(np.mean(guesses))


def test_no_constant_beats_chance_of_the_relative_error() -> None:
    counts = range(1, 16)
    errors = {guess: np.mean([min(1.0, abs(guess - right) / right) for right in counts]) for guess in range(101)}
    assert min(errors.values()) == errors[best_guess(counts)] == errors[BEST_CONSTANT]
    assert errors[BEST_CONSTANT] < 0.9 * np.mean([errors[guess] for guess in counts])


@pytest.mark.parametrize("question", [QUESTIONS[0], *exhaustive(*QUESTIONS[1:])])
def test_a_choice_by_log_probability_needs_no_generation(question: str, metadata: dict[str, Any]) -> None:
    name = f"sb_tally_{question}_forced"
    reads = Chooser(metadata["tokenizer"], solved, lambda answer, right: -0.5 if answer == right else -3.0, ".")
    results = evaluated(reads, [name], metadata)
    chance = {"count": 1 / 4, "most": 1 / 4, "compare": 1 / 2}[question]
    for length in LENGTHS:
        assert value(results, name, "score", length) == 1.0
        assert value(results, name, "chance", length) == pytest.approx(chance)
    first = Chooser(
        metadata["tokenizer"],
        solved,
        lambda answer, _: -float(int(answer) if answer.isdigit() else ord(answer[1])),
        ".",
    )
    results = evaluated(first, [name], metadata)
    right, errors, guesses = [], [], []
    for sample in results["samples"][name]:
        reference = sample["doc"]["references"][0]
        answers = sample["arguments"][: round(1 / chance)]
        assert len(sample["arguments"]) == len(LENGTHS) * len(answers)
        candidates = load_task(name, metadata).generator.candidates(sample["doc"]["index"])
        assert reference in candidates
        assert len(set(candidates)) == len(answers)
        chosen = min(candidates, key=lambda answer: int(answer) if answer.isdigit() else ord(answer[1]))
        right.append(chosen == reference)
        if question == "count":
            distances = [min(1.0, abs(int(answer) - int(reference)) / int(reference)) for answer in candidates]
            errors.append(distances[0])
            numbers = [int(answer) for answer in candidates]
            means = [np.mean([min(1.0, abs(guess - right) / right) for right in numbers]) for guess in numbers]
            guesses.append(distances[int(np.argmin(means))])
    assert value(results, name, "score", LENGTHS[1]) == pytest.approx(np.mean(right))
    if question == "count":
        assert value(results, name, "relative_error", LENGTHS[1]) == pytest.approx(np.mean(errors))
        assert value(results, name, "chance_relative_error", LENGTHS[1]) == pytest.approx(np.mean(guesses))


@pytest.mark.parametrize("question", [QUESTIONS[0], *exhaustive(*QUESTIONS[1:])])
def test_a_choice_is_right_if_one_answer_begins_another(question: str, folder: Path, metadata: dict[str, Any]) -> None:
    """As 1 begins 12 with tokens of single digits."""
    tokenizer, lengths = str(folder / "character"), [8000]
    name = f"sb_tally_{question}_forced"
    options = {**metadata, "tokenizer": tokenizer, "context_lengths": lengths, "num_samples": 40}
    results = evaluated(Speller(tokenizer, solved, lambda answer, right: 0.0), [name], options)
    if question == "count":
        generator = load_task(name, options).generator
        for_documents = [
            (sample["doc"]["references"][0], sample["doc"]["index"]) for sample in results["samples"][name]
        ]
        assert any(len(right) == 2 and "1" in generator.candidates(index) for right, index in for_documents)
    assert value(results, name, "score", lengths[0]) == 1.0


@pytest.mark.parametrize("labels", [2, 4, 8])
@pytest.mark.parametrize("question", QUESTIONS)
def test_without_the_text_every_answer_is_right_equally_often(
    question: str, labels: int, metadata: dict[str, Any]
) -> None:
    """Also the smallest count, the first label of the question, or any other rule that a model may follow."""
    generator = load_task(f"sb_tally_{question}", {**metadata, "labels": labels, "num_samples": 1}).generator
    places: Counter[int] = Counter()
    first_named = 0
    draws = 3000
    for index in range(draws):
        tally = generator.tally(index)
        candidates = generator.candidates(index)
        right = {"count": str(tally.counts[tally.asked]), "most": tally.most_frequent, "compare": tally.larger}[
            question
        ]
        places[candidates.index(right)] += 1
        first_named += tally.pair[0] == right
        assert sum(tally.counts.values()) == 32
    size = {"count": 4, "most": labels, "compare": 2}[question]
    assert len(places) == size
    expected = draws / size
    squares = sum((count - expected) ** 2 / expected for count in places.values())
    assert squares < size - 1 + 4.5 * (2 * size) ** 0.5
    if question == "compare":
        assert abs(first_named / draws - 0.5) < 4 * 0.5 / draws**0.5


def test_the_first_number_or_label_of_an_answer_counts() -> None:
    assert [count_in(text) for text in ("12", "There are 1,234 of 9.", "none", "-3")] == [12, 1234, None, 3]
    assert [label_in(text) for text in ("Red, not blue", "reddish green", "purple")] == ["red", "green", None]
    assert len(LABELS) == len(set(LABELS))


def test_what_a_user_can_mend_is_one_sentence(metadata: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="items"):
        load_task("sb_tally_count", {**metadata, "items": 8})
    with pytest.raises(UserError, match="labels"):
        load_task("sb_tally_count", {**metadata, "labels": 9})
    with pytest.raises(UserError, match=r"sb_tally_count.* needs at least"):
        load_task("sb_tally_count", {**metadata, "context_lengths": [256]})


def test_a_page_shows_scores_errors_and_chance(metadata: dict[str, Any], tmp_path: Path) -> None:
    tasks = ["sb_tally_count", "sb_tally_most"]
    run_tasks(Solver(), tasks, output=str(tmp_path / "reads"), metadata={**metadata, "label": "reads"})
    run_tasks(
        Solver(lambda right: "3 red"), tasks, output=str(tmp_path / "guess"), metadata={**metadata, "label": "guess"}
    )
    results = load_results([tmp_path])
    report = assemble(results, baseline=None, publish=lambda spec, stem: (stem, ()), folder=tmp_path)
    assert not [section for section in report.sections if section.identifier == "ruler"]
    (section,) = [section for section in report.sections if section.identifier == "tallies"]
    counts, most = section.figures
    assert counts.caption.title == "How many things have a label, generated"
    assert "reads 100% at 2,500, 100% at 5,000" in counts.caption.finding
    assert [plot["title"]["text"] for plot in counts.variants["score"]["concat"]] == ["right answers", "relative error"]
    assert [plot["title"]["text"] for plot in most.variants["score"]["concat"]] == ["right answers"]
    assert all('"chance"' in str(figure.variants["score"]).replace("'", '"') for figure in section.figures)
    table, _ = section.tables
    assert len(table.rows) == 4
    assert table.rows[0].cells[1].interval is not None


@pytest.mark.parametrize(
    ("protocol", "title"), [("tally_most", "The most frequent label, generated"), ("my", "Tally my")]
)
def test_a_tally_of_another_name_has_the_title_of_its_question(
    protocol: str, title: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    """Results without the question in their protocol have the name of the task."""
    metadata = {**metadata, "context_lengths": LENGTHS[:1], "label": "reads"}
    run_tasks(Solver(), ["sb_tally_most"], output=str(tmp_path), metadata=metadata)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        text = path.read_text().replace("sb_tally_most", "my")
        assert ('"protocol": "tally_most"' in text) == path.name.startswith("results_")
        path.write_text(text.replace('"protocol": "tally_most"', f'"protocol": "{protocol}"'))
        path.rename(path.with_name(path.name.replace("sb_tally_most", "my")))
    report = assemble(load_results([tmp_path]), baseline=None, publish=lambda spec, stem: (stem, ()), folder=tmp_path)
    (section,) = [section for section in report.sections if section.identifier == "tallies"]
    assert [figure.caption.title for figure in section.figures] == [title]
