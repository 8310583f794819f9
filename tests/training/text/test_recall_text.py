import re

import pytest

from sbeval.training.text.recall_text import PLAIN, RecallWriter


@pytest.fixture(scope="module")
def writer(source_texts):
    return RecallWriter(source_texts, seed=0)


def test_a_window_depends_on_seed_and_index_alone(writer, source_texts):
    again = RecallWriter(source_texts, seed=0)
    backwards = [again.window(index) for index in reversed(range(20))]
    assert [writer.window(index) for index in range(20)] == backwards[::-1]
    assert RecallWriter(source_texts, seed=1).window(0) != writer.window(0)


def test_a_number_asked_for_was_given_before(writer):
    answered = 0
    for index in range(200):
        text = writer.window(index)
        for match in re.finditer(r"print\((\w+)\)  # (\d+)|assert (\w+) == (\d+)", text):
            name, number = match.group(1) or match.group(3), match.group(2) or match.group(4)
            given = re.search(rf"\b{name}(: int)? = {number}", text)
            if given is not None:
                answered += 1
                assert given.start() < match.start()
    assert answered > 50


def test_needle_prompts_repeat_the_key_and_its_number(writer):
    prompts = [writer.window(index) for index in range(300)]
    asked = re.compile(
        r"What is the special magic number for (\S+) mentioned in the provided text\?\s"
        r"The special magic number for \1 mentioned in the provided text is (\d{7})\."
    )
    found = [(text, match) for text in prompts for match in asked.finditer(text)]
    assert len(found) > 10
    for text, match in found:
        given = f"One of the special magic numbers for {match.group(1)} is: {match.group(2)}."
        assert 0 <= text.find(given) < match.start()


def test_all_three_kinds_occur_and_distances_reach_far(writer):
    texts = [writer.window(index) for index in range(200)]
    assert sum(text.count("# ") > 0 for text in texts) > 50
    distances = []
    for text in texts:
        for match in re.finditer(r"^\s*(\w+)(?:: int)? = (\d{3,8})$", text, re.MULTILINE):
            later = text.rfind(match.group(2))
            if later > match.end():
                distances.append(later - match.end())
    assert max(distances) > 2000
    assert min(distances) < 300
    assert PLAIN == 2
