"""Prompts have the structure of NVIDIA's definitions; a few independent lines parse each of them."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruler_problems import NIAH, load_task, prompts
from scipy.special import zeta

from sbeval.tasks.ruler.task import parse_answer, string_match_all, string_match_part
from sbeval.tasks.ruler.texts import load_essays

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
VALUES = {"numbers": r"[1-9]\d{6}", "uuids": UUID, "words": r"[^\s:][^:\n]*-[^:\n]+"}
# NVIDIA/RULER, scripts/synthetic.yaml: haystack, keys, values, number of keys, values of each, queries
DEFINITIONS = {
    "sb_niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "sb_niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "sb_niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "sb_niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "sb_niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "sb_niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "sb_niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "sb_niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}


@pytest.fixture
def metadata(folder: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    return {**corpora, "tokenizer": str(folder / "byte_level_bpe"), "num_samples": 6, "context_lengths": [3000]}


def read(name: str, metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    task = load_task(name, metadata)
    return list(zip(prompts(task), list(task.eval_docs), strict=True))


@pytest.mark.parametrize("name", NIAH)
def test_needles_and_question(name: str, metadata: dict[str, Any]) -> None:
    haystack, key_type, value_type, keys, values, queries = DEFINITIONS[name]
    one = values * queries == 1
    noun = value_type[:-1] if one else value_type
    for prompt, doc in read(name, metadata):
        intro = (
            f"{'A' if one else 'Some'} special magic {noun} {'is' if one else 'are'} hidden within the following text."
        )
        assert prompt.startswith(f"{intro} Make sure to memorize it. I will quiz you about the {noun} afterwards.\n")
        needle = rf"One of the special magic {value_type} for ({VALUES[key_type]}) is: ({VALUES[value_type]})\."
        found = re.findall(needle, prompt)
        assert prompt.count("One of the special magic") == len(found)
        if haystack != "needle":
            assert len(found) == keys * values == len({value for _, value in found})
        assert len({key for key, _ in found}) == (len(found) if haystack == "needle" else keys)
        question = "What is the" if one else "What are all the"
        tail = prompt.rpartition(f"\n{question} special magic {noun} for ")[2]
        query, prefix = tail.split(" mentioned in the provided text? ")
        asked = query.replace(", and ", ", ").split(", ") if queries > 1 else [query]
        assert len(asked) == queries
        verb = "is" if one else "are"
        assert prefix == f"The special magic {noun} for {query} mentioned in the provided text {verb}"
        assert Counter(doc["references"]) == Counter(value for key, value in found if key in asked)
        assert len(doc["depths_percent"][0]) == values * queries
        body = prompt.partition("afterwards.\n")[2].rpartition(f"\n{question}")[0]
        if haystack == "noise":
            assert Counter(body.split("\n")).most_common(1)[0] == (NOISE, len(body.split("\n")) - 1)
        elif haystack == "needle":
            assert all(re.fullmatch(needle, line) for line in body.split("\n"))


@pytest.mark.parametrize("index", [4820, 4995, 4997])
def test_a_value_drawn_from_the_haystack_by_chance_is_drawn_again(metadata: dict[str, Any], index: int) -> None:
    task = load_task("sb_niah_multikey_2", metadata)  # these samples' first draws are values of the haystack
    draft = task.generator.draft(index, 4096)
    lines = draft.haystack.text(0, 8192)
    assert lines.count("\n") == 8192
    assert draft.references[0] not in lines


def test_needles_in_essays_stand_between_sentences(metadata: dict[str, Any]) -> None:
    for prompt, _ in read("sb_niah_multikey_1", metadata):
        for before in re.findall(r"(.{2})One of the special magic", prompt, flags=re.DOTALL):
            assert before[-1] in " \n"
            assert before[0] in ".!?\"'"


def test_hidden_files_are_no_essays(tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt"):
        (tmp_path / name).write_text(name)
    assert load_essays(str(tmp_path)).words == ["a.txt"]


def test_essays_come_in_order_and_again_where_they_end(metadata: dict[str, Any]) -> None:
    words = " ".join(path.read_text() for path in sorted(Path(metadata["essays"]).glob("*.txt"))).split()
    for prompt, doc in read("sb_niah_single_2", {**metadata, "context_lengths": [12000]}):
        body = prompt.partition("afterwards.\n")[2].rpartition("\nWhat")[0]
        rest = re.sub(r"One of the special magic numbers for [^:]+: \d+\.", "", body).split()
        assert len(rest) == doc["haystack_units"][0] > len(words)
        assert rest == (words * 9)[: len(rest)]


def test_variable_tracking_has_one_worked_example_and_its_chain_in_order(metadata: dict[str, Any]) -> None:
    shown = set()
    for prompt, doc in read("sb_ruler_vt", metadata):
        intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        example, real = prompt.removeprefix(intro).split("\n\n" + intro)
        for text, letters in ((example, 3), (real, 5)):
            value = re.search(r"VAR ([A-Z]+) = (\d{5})\n", text)
            hops = re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+) \n", text)
            names = [value[1], *(name for name, _ in hops)]
            assert len(hops) == 4
            assert ([old for _, old in hops], {len(name) for name in names}) == (names[:-1], {letters})
            question = f"Question: Find all variables that are assigned the value {value[2]} in the text above."
            assert f"{question} Answer: According to the chain(s) of variable assignment in the text above, 5" in text
            if text is example:
                assert text.endswith(f"the value {value[2]}, they are: {' '.join(names)}")
            else:
                assert text.endswith(f"the value {value[2]}, they are:")
                assert names == doc["references"]
        asked = (intro + example).rpartition(": ")[0]
        names_may_add = 3 * (1 + 2 * 4) + 3 * 4  # the length is settled with other names and another value
        assert 500 - 60 < len(load_tokens(metadata, asked)) <= 500 + names_may_add
        shown.add(example)
        assert set(re.split(r"VAR .*\n|\n", real.partition("Question:")[0])) == {"", NOISE}
    assert len(shown) == 6


def load_tokens(metadata: dict[str, Any], text: str) -> list[int]:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(metadata["tokenizer"])(text)["input_ids"]


@pytest.mark.parametrize("haystack", ["noise", "essay"])
def test_a_worked_example_has_the_questions_own_chains_and_haystack(metadata: dict[str, Any], haystack: str) -> None:
    options = {"type_haystack": haystack, "num_chains": 2, "num_hops": 3}
    end = r"\." if haystack == "essay" else " ?\n"
    for prompt, doc in read("sb_ruler_vt", {**metadata, **options}):
        example, real = prompt.split("\n\nMemorize and track")
        for text, letters in ((example, 3), (real, 5)):
            body, question = text.rsplit("\nQuestion: Find all variables that are assigned the value ", 1)
            name = f"[A-Z]{{{letters}}}"
            values = dict(re.findall(rf"VAR ({name}) = (\d{{5}}){end}", body + "\n"))
            hops = re.findall(rf"VAR ({name}) = VAR ({name}){end}", body + "\n")
            assert (len(values), len(set(values.values())), len(hops)) == (2, 2, 6)
            chain = [next(name for name, value in values.items() if value == question[:5])]
            for new, old in hops:
                if old == chain[-1]:
                    chain.append(new)
            answer = " ".join(chain) if text is example else ""
            assert question.endswith(
                f"text above, 4 variables are assgined the value {question[:5]}, they are: {answer}".strip()
            )
            assert (NOISE in body) == (haystack == "noise")
        assert chain == doc["references"]
        assert 400 < len(load_tokens(metadata, example)) < 800  # 500, or as many lines as there are statements
        assert doc["prompt_tokens"] == [len(load_tokens(metadata, prompt))]
        assert 3000 - 30 - 40 < doc["prompt_tokens"][0] <= 3000 - 30


@pytest.mark.parametrize("shots", [0, 3])
def test_the_number_of_worked_examples_is_configurable(metadata: dict[str, Any], shots: int) -> None:
    for task in ("sb_ruler_vt", "sb_ruler_cwe"):
        for prompt, _ in read(task, {**metadata, "num_fewshot": shots, "context_lengths": [6000]}):
            assert prompt.count("Question: ") == shots + 1
            assert len(set(prompt.split("Memorize ")[1:-1])) == shots


@pytest.mark.parametrize(("length", "example", "repeats"), [(3000, (20, 3, 1), (6, 1)), (9000, (40, 10, 3), (30, 3))])
def test_common_words_and_their_worked_example(
    metadata: dict[str, Any], length: int, example: tuple[int, int, int], repeats: tuple[int, int]
) -> None:
    for prompt, doc in read("sb_ruler_cwe", {**metadata, "context_lengths": [length]}):
        intro = "Below is a numbered list of words. In these words, some appear more often than others."
        _, shown, real = prompt.split(f"{intro} Memorize the ones that appear most often.\n")
        for text, (common, uncommon) in ((shown, example[1:]), (real, repeats)):
            listed, answer = text.split("\nQuestion: What are the 10 most common words in the above list? Answer:")
            words = re.findall(r"(?:^| )(\d+)\. (.+?)(?= \d+\. |$)", listed)
            assert [int(number) for number, _ in words] == list(range(1, len(words) + 1))
            counts = Counter(word for _, word in words)
            assert Counter(counts.values()) == {common: 10, uncommon: len(counts) - 10}
            top = [word for word, count in counts.items() if count == common]
            assert answer.startswith(" The top 10 words that appear most often in the list are:")
            if text is shown:
                assert len(counts) == example[0]
                assert sorted(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", answer)) == sorted(top)
            else:
                assert sorted(doc["references"]) == sorted(top)


def test_coded_words_fall_off_by_rank(metadata: dict[str, Any]) -> None:
    for prompt, doc in read("sb_ruler_fwe", metadata):
        text = prompt.split("Find the three most frequently appeared coded words. ")[1].split("\nQuestion: ")[0]
        counts = Counter(text.split())
        units = doc["haystack_units"][0]
        expected = (units * np.arange(1, (3000 - 50) // 50 + 1) ** -2.0 / zeta(2.0)).astype(int)
        assert sorted(counts.values(), reverse=True) == [count for count in expected.tolist() if count]
        assert [word for word, _ in counts.most_common(4)] == ["...", *doc["references"]]
        assert all(re.fullmatch(r"\.\.\.|[a-z]{6}", word) for word in counts)
        assert prompt.endswith("According to the coded text above, the three most frequently appeared words are:")


def test_questions_keep_their_documents(metadata: dict[str, Any]) -> None:
    for name, own in (("sb_ruler_qa_squad", 1), ("sb_ruler_qa_hotpot", 4)):
        for prompt, doc in read(name, {**metadata, "context_lengths": [1500]}):
            context, question = prompt.rsplit("\n\nQuestion: ", 1)
            instruction = "Answer the question based on the given documents. Only give me the answer and do not output "
            assert context.count(instruction + "any other words.") == 2
            numbers = [int(number) for number in re.findall(r"(?:^|\n\n)Document (\d+):\n", context)]
            assert numbers == list(range(1, doc["haystack_units"][0] + 1))
            assert question.endswith("? Answer:")
            assert len(doc["depths_tokens"][0]) == own
            if name == "sb_ruler_qa_squad":
                assert f"was founded {doc['references'][0]}." in context
                assert doc["references"] == [f"in {doc['references'][1]}", doc["references"][1]]
            else:
                assert context.count(f"Title {doc['index']}-") == own


def test_impossible_questions_are_left_out(metadata: dict[str, Any]) -> None:
    task = load_task("sb_ruler_qa_squad", {**metadata, "num_samples": 500})
    assert task.num_samples == 24
    assert all("founded" in prompt for prompt in prompts(task))


CASES = [
    ("the numbers are 1234567 and 7654321", ["1234567", "7654321"], 1.0, 1.0),
    ("the numbers are 1234567", ["1234567", "7654321"], 0.5, 1.0),
    ("12345678", ["1234567"], 1.0, 1.0),
    ("123456", ["1234567"], 0.0, 0.0),
    ("", ["1234567"], 0.0, 0.0),
    ("NEW YORK city", ["New York", "NYC", "new york city"], 2 / 3, 1.0),
    ("in 1066, they say", ["1066", "1066 AD", "the year 1066"], 1 / 3, 1.0),
    ("abc", ["ABC", "abc", "x", "y"], 0.5, 1.0),
    ("one\ntwo", ["one two"], 0.0, 0.0),
]


@pytest.mark.parametrize(("answer", "references", "share", "any_found"), CASES)
def test_table_of_cases(answer: str, references: list[str], share: float, any_found: float) -> None:
    assert string_match_all(answer, references) == pytest.approx(share)
    assert string_match_part(answer, references) == any_found


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [("  42\n", "42"), ("4\x002", "4\n2"), ("\x07 42 \x1f", "42"), ("a\tb", "a\nb"), ("\u00e9\x7f", "\u00e9\x7f")],
)
def test_control_characters_become_line_breaks(answer: str, parsed: str) -> None:
    assert parse_answer(answer) == parsed
