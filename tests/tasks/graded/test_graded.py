"""Graded tasks: a program solves each prompt, levels share their samples, and a page says which orders are measured."""

import collections
import functools
import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS as TOKENIZERS
from ruler_problems import evaluated, load_task, prompts

from sbeval.errors import UserError
from sbeval.evaluation import run_tasks
from sbeval.reports import load_results
from sbeval.reports.build import assemble
from sbeval.tasks.graded.qa import sentence_with
from sbeval.tasks.graded.scores import chosen_letter, direct_answer, exact_match, soft_match, two_steps
from sbeval.tasks.ruler.drafts import Frame
from tests.marks import exhaustive

KINDS = ("needle", "variables", "words", "qa")
LEVELS = ("basic", "easy", "medium", "hard")
FORMS = ("", "_steps", "_choice")
LENGTHS = [2048, 4096]


def names(form: str = "", kinds: tuple[str, ...] = KINDS) -> list[str]:
    return [f"sb_graded_{kind}_{level}{form}" for kind in kinds for level in LEVELS]


@pytest.fixture
def metadata(folder: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    options = {"context_lengths": LENGTHS, "num_samples": 6}
    return {**corpora, **options, "tokenizer": str(folder / "byte_level_bpe")}


def read(prompt: str) -> tuple[str, str]:
    """Reads the evidence and the answer from the text of a prompt."""
    if "What is the password of" in prompt:
        key = re.findall(r"What is the password of (\S+)\?", prompt)[-1]
        (value,) = re.findall(rf"^The password of {key} is (.+)\.$", prompt, re.MULTILINE)
        return f"The password of {key} is {value}.", value
    if "boxes hold" in prompt:
        count, value = re.findall(r"Which (\d) boxes hold (\d+),", prompt)[-1]
        held: dict[str, str] = {}
        evidence = []
        for line in re.findall(r"^Box .+\.$", prompt, re.MULTILINE):
            name, what, other = re.fullmatch(r"Box (\w+) holds (?:(\d+)|what box (\w+) holds)\.", line).groups()
            held[name] = what or held[other]
            if held[name] == value:
                evidence.append((name, line))
        assert len(evidence) == int(count)
        return " ".join(line for _, line in evidence), ", ".join(name for name, _ in evidence)
    if prompt.startswith("This is a numbered list"):
        count = int((re.findall(r"Which (\d+) words occur", prompt) or ["1"])[0])
        listed = re.findall(r"\d+\. (\S+)", prompt.partition("\nWhich")[0])
        (*first, after) = collections.Counter(listed).most_common(count + 1)
        assert min(number for _, number in first) > after[1]
        first.sort()
        return ", ".join(f"{word} {number}" for word, number in first), ", ".join(word for word, _ in first)
    towns = re.findall(r"When was town (\S+) founded\?", prompt)
    years = [re.findall(rf"Town {town} was founded in (\d+)\.", prompt)[0] for town in towns]
    sentences = [f"Town {town} was founded in {year}." for town, year in zip(towns, years, strict=True)]
    return " ".join(sentences), "; ".join(f"in {year}" for year in years)


def solved(prompt: str) -> str:
    """Answers a prompt in the form that it asks for."""
    evidence, answer = read(prompt)
    if "Give only the letter" in prompt:
        return dict((text, letter) for letter, text in re.findall(r"^([A-D])\. (.+)$", prompt, re.MULTILINE))[answer]
    return f"{evidence}\nAnswer: {answer}\nAnd more." if "First write a line" in prompt else f"{answer}\nAnd more."


class Solver(PartialModel):
    """Answers what `answer` makes of a prompt."""

    def __init__(self, answer: Callable[[str], str] = solved) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [f" {self.answer(request.args[0])}" for request in requests]


@pytest.mark.parametrize("form", [FORMS[0], *exhaustive(*FORMS[1:])])
def test_a_program_that_reads_the_prompt_is_right_at_every_level_and_length(
    form: str, metadata: dict[str, Any]
) -> None:
    results = evaluated(Solver(), names(form), metadata)
    metrics = {"": ("exact_match", "soft_match"), "_choice": ("exact_match",)}
    for name in names(form):
        for length in LENGTHS:
            for metric in metrics.get(form, ("exact_match", "soft_match", "first_step")):
                assert results["results"][name][f"{metric}@{length:07d},none"] == 1.0, (name, metric)
        for sample in results["samples"][name]:
            assert sample["doc"]["lengths"] == LENGTHS
            assert all(
                0 <= length - tokens < 600
                for length, tokens in zip(LENGTHS, sample["doc"]["prompt_tokens"], strict=True)
            )
            assert sample["doc"]["level"] in name


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_fit_with_every_tokenizer(kind: str, tokenizer: str, folder: Path, metadata: dict[str, Any]) -> None:
    for level in LEVELS:
        options = {**metadata, "tokenizer": str(folder / tokenizer), "context_lengths": [8192], "num_samples": 3}
        task = load_task(f"sb_graded_{kind}_{level}", options)
        for prompt, document in zip(prompts(task), task.eval_docs, strict=True):
            tokens = len(task.counter.tokenizer(prompt)["input_ids"])
            assert document["prompt_tokens"] == [tokens]
            assert tokens <= 8192 - task.generated_tokens
            assert solved(prompt).split("\n")[0] in document["references"]


def body_lines(prompt: str, pattern: str) -> list[str]:
    return re.findall(pattern, prompt, re.MULTILINE)


@pytest.mark.exhaustive
def test_levels_and_forms_share_keys_values_and_the_order_of_the_haystack(metadata: dict[str, Any]) -> None:
    by_name = {name: prompts(load_task(name, metadata)) for form in FORMS for name in names(form)}
    for index in range(12):  # six samples at two lengths
        needles = [by_name[name][index] for form in FORMS for name in names(form, ("needle",))]
        assert len({read(prompt) for prompt in needles}) == 1
        counts = [len(body_lines(prompt, "^The password of")) for prompt in needles[:4]]
        lines = [len(prompt.splitlines()) - 3 for prompt in needles[:4]]
        assert counts[0] == 1
        assert 0.05 < counts[1] / lines[1] < 0.3
        assert [counts[level] for level in (2, 3)] == [lines[level] for level in (2, 3)]
        key = re.findall(r"What is the password of (\S+)\?", needles[3])[0]
        near = [
            sum(word in set(key.split("-")) for word in line.split()[3].split("-"))
            for line in body_lines(needles[3], "^The password of .+$")
        ]
        assert collections.Counter(near)[1] == 16
        assert collections.Counter(near)[2] == 1
        # the lines of the haystack that a level shares with the one before have the same order
        for easier, harder in ((0, 1), (2, 3)):
            haystacks = (needles[level].splitlines()[1:-2] for level in (easier, harder))
            first, second = ([line for line in lines if key not in line] for lines in haystacks)
            shared = [line for line in first if line in set(second)]
            assert shared == [line for line in second if line in set(first)]
            assert len(shared) > 0.6 * min(len(first), len(second))
        boxes = [by_name[name][index] for name in names("", ("variables",))]
        answers = [read(prompt)[1].split(", ") for prompt in boxes]
        assert list(map(len, answers)) == [2, 3, 5, 9]
        for easier, harder in itertools.pairwise(answers):
            assert [name for name in harder if name in easier] == easier
        words = [set(read(by_name[name][index])[1].split(", ")) for name in names("", ("words",))]
        assert words[0] < words[1] < words[2] < words[3]
        questions = [re.findall(r"When was town (\S+) founded", by_name[name][index]) for name in names("", ("qa",))]
        assert [len(question) for question in questions] == [1, 1, 1, 2]
        assert len({question[0] for question in questions}) == 1
    task = load_task("sb_graded_needle_hard", {**metadata, "near_keys": 2})
    near = len(task.generator.draft(0, 2048).inserts)
    assert near == 4  # a level is a set of options; another key holds the third wrong choice


@pytest.mark.parametrize("level", LEVELS)
def test_every_choice_of_needles_is_in_the_text_if_it_names_others(level: str, metadata: dict[str, Any]) -> None:
    task = load_task(f"sb_graded_needle_{level}_choice", {**metadata, "context_lengths": [1024, 4096]})
    directs = prompts(load_task(f"sb_graded_needle_{level}", {**metadata, "context_lengths": [1024, 4096]}))
    for prompt, direct in zip(prompts(task), directs, strict=True):
        choices = re.findall(r"^[A-D]\. (.+)$", prompt, re.MULTILINE)
        key = re.findall(r"What is the password of (\S+)\?", prompt)[-1]
        keys = {
            choice: re.findall(rf"^The password of (\S+) is {choice}\.$", prompt, re.MULTILINE) for choice in choices
        }
        counts = [len(keys[choice]) for choice in choices]
        if level == "basic":
            assert sorted(counts) == [0, 0, 0, 1]
            continue
        assert counts == [1, 1, 1, 1]
        assert all(choice in direct for choice in choices)
        others = [other for (other,) in keys.values() if other != key]
        assert len(others) == 3
        assert all(bool(set(other.split("-")) & set(key.split("-"))) == (level == "hard") for other in others)


def test_no_choice_of_several_parts_is_more_like_the_others(metadata: dict[str, Any]) -> None:
    for name in [*names("_choice", ("variables",)), *names("_choice", ("words",))[1:], "sb_graded_qa_hard_choice"]:
        for prompt in prompts(load_task(name, {**metadata, "context_lengths": [4096]})):
            choices = [
                set(text.split(", ")) if ";" not in text else set(text.split("; "))
                for _, text in re.findall(r"^([A-D])\. (.+)$", prompt.rpartition("\n\n")[2], re.MULTILINE)
            ]
            assert len(choices) == 4
            shared = [sorted(len(one & other) for other in choices) for one in choices]
            assert all(counts == shared[0] for counts in shared)
    letters = [doc["references"][0] for doc in load_and_build("sb_graded_words_hard_choice", metadata)]
    assert len(set(letters)) > 1


def load_and_build(name: str, metadata: dict[str, Any]) -> Any:
    task = load_task(name, {**metadata, "num_samples": 20})
    task.build_all_requests(rank=0, world_size=1)
    return task.eval_docs


@functools.cache
def edits(answer: tuple[str, ...], reference: tuple[str, ...]) -> int:
    """The definition of the Levenshtein distance."""
    if not answer or not reference:
        return len(answer) + len(reference)
    if answer[0] == reference[0]:
        return edits(answer[1:], reference[1:])
    return 1 + min(edits(answer[1:], reference), edits(answer, reference[1:]), edits(answer[1:], reference[1:]))


def test_the_soft_match_is_one_minus_the_word_error_rate() -> None:
    by_hand = [
        ("amber river stone lamp", "amber river stone lamp", 1.0),
        ("Amber, River; stone lamp!", "amber river stone lamp", 1.0),
        ("amber river stone", "amber river stone lamp", 0.75),
        ("amber stone river lamp", "amber river stone lamp", 0.5),
        ("the amber river stone lamp", "amber river stone lamp", 0.75),
        ("", "amber river", 0.0),
        ("one two three four five six", "amber", 0.0),  # a WER of 6
        ("amber one two", "amber", 0.0),  # a WER of 2
        ("%", "%", 1.0),
        ("a", "%", 0.0),
    ]
    for answer, reference, score in by_hand:
        assert soft_match(answer, [reference]) == score
        assert exact_match(answer, [reference]) == float(score == 1)
    assert soft_match("amber river", ["one two", "amber lamp", "one"]) == 0.5
    rng = random.Random(1)
    for _ in range(300):
        answer, reference = (tuple(rng.choices("abc", k=rng.randint(least, 6))) for least in (0, 1))
        expected = max(0.0, 1 - edits(answer, reference) / len(reference))
        assert soft_match(" ".join(answer), [" ".join(reference)]) == pytest.approx(expected, abs=1e-15)


def test_the_parts_of_an_answer_are_found() -> None:
    assert direct_answer("\n Answer: amber river\nNext") == "amber river"
    assert two_steps("Found: it says so.\nAnswer: amber\nQuestion") == ("it says so.", "amber")
    assert two_steps("it says so. amber") == ("it says so. amber", "")
    for answer, letter in (
        ("B", "B"),
        (" (C) amber", "C"),
        ("The answer is D.", "D"),
        ("A or rather B", "A"),
        ("", ""),
    ):
        assert chosen_letter(answer) == letter
    assert chosen_letter("amber") == ""


def test_scores_are_those_of_the_logged_samples(metadata: dict[str, Any]) -> None:
    def forgets(prompt: str) -> str:
        """Drops the last word of every second answer, and the cue of every third."""
        answer = solved(prompt)
        number = int(hashlib.sha256(prompt.encode()).hexdigest(), 16)
        words = answer.split("\nAnd")[0].split(" ")
        return " ".join(words[:-1] if number % 2 else words).replace("Answer:", "" if number % 3 == 0 else "Answer:")

    for name in ("sb_graded_needle_easy", "sb_graded_variables_hard_steps", "sb_graded_words_medium"):
        results = evaluated(Solver(forgets), [name], {**metadata, "num_samples": 20})
        for place, length in enumerate(LENGTHS):
            expected: dict[str, list[float]] = collections.defaultdict(list)
            for sample in results["samples"][name]:
                answer = sample["filtered_resps"][place]
                evidence, right = read(sample["arguments"][place][0])
                if name.endswith("_steps"):
                    first, _, answer = answer.partition("Answer:")
                    expected["first_step"].append(rate(first, evidence))
                expected["soft_match"].append(rate(answer, right))
                expected["exact_match"].append(answer.strip() == right)
            for metric, values in expected.items():
                mean = sum(values) / len(values)
                assert results["results"][name][f"{metric}@{length:07d},none"] == pytest.approx(mean)
                assert 0 < mean < 1


def rate(answer: str, right: str) -> float:
    answered, reference = (tuple(re.sub(r"[^a-z0-9 ]", "", text.lower()).split()) for text in (answer, right))
    return max(0.0, 1 - edits(answered, reference) / len(reference))


def test_samples_that_do_not_fit_and_impossible_levels_are_said(metadata: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="sb_graded_words_hard needs at least"):
        load_task("sb_graded_words_hard", {**metadata, "context_lengths": [300]})
    name = "sb_graded_qa_hard"
    options = {**metadata, "context_lengths": [2048], "num_samples": 20, "too_long": "leave_out"}
    needed = load_task(name, options).sizes.needed_tokens(20, 2048, Frame())
    length = sorted(needed)[9]
    task = load_task(name, {**options, "context_lengths": [int(length), 2048]})
    task.build_all_requests(rank=0, world_size=1)
    assert task.task_record.left_out_samples == {str(length): sum(needed > length), "2048": 0}
    assert sum(needed > length) > 0
    for name, options, message in (
        ("sb_graded_variables_hard", {"hops": 9}, "hops is 9, and a sample has at most 8"),
        ("sb_graded_words_hard", {"other_repeats": 12}, "frequent_repeats is 12 and other_repeats 12"),
        ("sb_graded_needle_hard", {"near_keys": 40}, "near_keys is 40"),
        ("sb_graded_words_hard", {"asked": 40000, "context_lengths": [65536]}, "asked is 40000, and a sample has at"),
        ("sb_graded_words_hard", {"scripts": "nvidia"}, "has no option scripts, which is 'nvidia': set it under"),
        ("sb_graded_qa_hard", {"questions": 3}, "questions is 3"),
        ("sb_graded_qa_hard", {"level": "easy"}, "level"),
    ):
        with pytest.raises(UserError, match=message):
            load_task(name, {**metadata, name: options})


def test_documents_that_levels_and_lengths_share_have_one_order(metadata: dict[str, Any]) -> None:
    by_name = {name: prompts(load_task(name, metadata)) for name in names("", ("qa",))}
    for index in range(6):
        orders = []
        for made in by_name.values():
            for prompt in made[2 * index : 2 * index + 2]:
                documents = re.findall(r"^Document \d+:\n(Town \S+)", prompt, re.MULTILINE)
                if len(documents) == len(set(documents)):  # a small corpus is repeated
                    orders.append(documents)
        assert len({len(order) for order in orders}) > 1
        for one, other in itertools.combinations(orders, 2):
            shared = [document for document in one if document in other]
            assert len(shared) > 2
            assert shared == [document for document in other if document in one]


def test_the_evidence_is_the_sentence_with_the_answer() -> None:
    document = "Dr. Hale came from the U.S. in 1899. He built St. Mary's Hall. It burnt. It was rebuilt by Dr. Hale."
    assert sentence_with("1899", document) == "in 1899."
    assert sentence_with("St. Mary's Hall", document) == "He built St. Mary's Hall."
    assert sentence_with("burnt", document) == "It burnt."
    assert sentence_with("burnt. It", document) == "It burnt. It was rebuilt by Dr."
    assert sentence_with("Dr. Hale", document) == "Dr. Hale came from the U.S."
    assert sentence_with("Mary", "Nothing. At all.") == "Nothing. At all."


def page(folder: Path) -> Any:
    results = load_results([folder])
    return assemble(results, baseline=None, publish=lambda spec, stem: (stem, ()), folder=folder)


def test_a_page_says_for_each_pair_of_levels_whether_the_order_is_measured(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    def level_of(prompt: str) -> int:
        key = re.findall(r"What is the password of (\S+)\?", prompt)[0]
        share = prompt.count("The password of") / len(prompt.splitlines())
        return 0 if share < 0.05 else 1 if share < 0.4 else 2 + (prompt.count(key.split("-")[1]) > 4)

    def graded(prompt: str) -> str:
        """Right at basic, in half of the samples at easy and medium (others at medium), in all at hard."""
        word = read(prompt)[1]
        level = level_of(prompt)
        is_right = {0: True, 1: sum(map(ord, word)) % 2 == 0, 2: sum(map(ord, word[1:])) % 2 == 0, 3: True}
        return word if is_right[level] else "no"

    options = {**metadata, "num_samples": 40}
    tasks = names("", ("needle",))
    run_tasks(Solver(graded), tasks, output=str(tmp_path / "graded"), metadata={**options, "label": "graded"})
    run_tasks(Solver(), tasks, output=str(tmp_path / "all"), metadata={**options, "label": "right"}, limit=10)
    (section,) = [section for section in page(tmp_path).sections if section.identifier == "levels"]
    exact, _ = section.figures
    assert exact.caption.title == "Graded needle: exact match"
    assert (
        "graded at 4,096: order of basic and easy measured, of easy and medium not measured, of medium and hard "
        "measured the other way round"
    ) in exact.caption.finding.replace("4K", "4,096")
    assert "right at" in exact.caption.finding
    assert "fewer than 20 samples" in exact.caption.finding
    plots = exact.variants["score"]["concat"]
    assert [plot["title"]["text"] for plot in plots] == list(LEVELS)
    table, _ = section.tables
    rows = {row.cells[0].plain: row.cells[1:] for row in table.rows}
    assert list(rows)[:3] == ["graded, basic minus easy", "graded, easy minus medium", "graded, medium minus hard"]
    samples = [
        json.loads(line)
        for path in (tmp_path / "graded").rglob("samples_sb_graded_needle_easy_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    mean = sum(sample["exact_match@0002048"] for sample in samples) / 40
    assert rows["graded, basic minus easy"][0].text == f"{1 - mean:+.1%}"
    assert rows["graded, basic minus easy"][0].small == ("order measured",)
    assert rows["graded, medium minus hard"][0].verdict == "worse"
    assert rows["right, basic minus easy"][0].interval is None
    measured = load_results([tmp_path / "graded"]).measurements
    assert set(measured["level"].dropna()) == set(LEVELS)
    assert set(measured["protocol"]) == {"graded_needle"}
