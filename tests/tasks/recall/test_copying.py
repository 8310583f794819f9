"""Copying: what comes back stands where it is said to, lengths are exact, and copying is what answers."""

import abc
import itertools
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS, evaluated, load_task
from tokenizers import processors

from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.scoring.requests import TargetLogprobs, TargetSequence, resolve_sequence
from sbeval.tasks.recall.copying import WordList
from sbeval.tasks.recall.task import Condition
from tests.marks import exhaustive

FORMS = ("sb_copy_passage", "sb_copy_selective", "sb_copy_phrase")


@pytest.fixture(scope="session")
def task_of(folder: Path) -> Any:
    @cache
    def load(name: str, kind: str) -> Any:
        options = {"passage_words": 12, "marked_words": 6, "phrase_words": 5}
        return load_task(name, {"tokenizer": str(folder / kind), "context_lengths": [2048], **options})

    return load


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(700, 20_000), index=st.integers(0, 50))
def test_every_answer_stands_where_it_is_said_to(task_of: Any, name: str, kind: str, length: int, index: int) -> None:
    task = task_of(name, kind)
    shown, replaced = task.make_sequences(index, Condition(length))
    inputs, positions, targets = shown.sequence
    assert len(inputs) == len(replaced.sequence.inputs_L) == length
    assert positions[-1] == length - 1
    assert (np.diff(positions) > 0).all()
    whole = np.append(inputs, targets[-1])
    assert (whole[positions + 1] == targets).all()
    changed = np.flatnonzero(inputs != replaced.sequence.inputs_L)
    copied = task.copied(length, task.config.task, task.options.seed, index)
    answers = [one for one in copied if one.is_scored]
    assert shown.answer_tokens.tolist() == [len(task.words.tokens[one.word]) for one in answers]
    sources: set[int] = set()
    for one in copied:
        own = task.words.tokens[one.word]
        for place in (one.source, one.target):
            assert (whole[place : place + len(own)] == own).all()
        if one.is_scored:
            sources |= set(range(one.source, one.source + len(own)))
            assert (
                inputs[one.source : one.source + len(own)] != replaced.sequence.inputs_L[one.source :][: len(own)]
            ).any()
    assert set(changed.tolist()) <= sources
    assert (replaced.sequence.targets_T == targets).all()
    again, _ = task.make_sequences(index, Condition(length))
    assert (again.sequence.inputs_L == inputs).all()
    other, _ = task.make_sequences(index + 1, Condition(length))
    assert (other.sequence.inputs_L != inputs).any()


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<unk> <s> $A </s>", "$A </s>"])
@pytest.mark.parametrize("name", FORMS)
def test_a_text_begins_with_the_whole_prefix_of_the_tokenizer(folder: Path, name: str, template: str) -> None:
    tokenizer = load_tokenizer(folder / "sentencepiece")
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "<unk>")]
    processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    options = {"passage_words": 12, "marked_words": 6, "phrase_words": 5}
    task = load_task(name, {"tokenizer": tokenizer, "context_lengths": [1024], **options})
    inputs, positions, targets = task.make_sequences(0, Condition(1024))[0].sequence
    prefix = [tokenizer.convert_tokens_to_ids(token) for token in template.partition("$A")[0].split()]
    ids = [token for _, token in special]
    assert [token for token in inputs.tolist() if token in ids] == inputs[: len(prefix)].tolist() == prefix
    assert len(inputs) == 1024
    assert (np.append(inputs, targets[-1])[positions + 1] == targets).all()


@pytest.mark.parametrize("kind", KINDS)
def test_phrases_come_back_after_their_distance_and_none_meets_another(task_of: Any, kind: str) -> None:
    task = task_of("sb_copy_phrase", kind)
    for length in (2048, 5000):
        distances = task.distances(length)
        assert distances == tuple(2**power for power in range(7, 20) if 2**power <= length // 2)
        copied = task.copied(length, "any", 0)
        own = Counter(one.target - one.source for one in copied)
        assert own == {distance: 2 * task.options.phrase_words for distance in distances}
        spans = sorted(
            (place, place + len(task.words.tokens[one.word])) for one in copied for place in (one.source, one.target)
        )
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert spans[0][0] >= 1
        assert spans[-1][1] == length + 1


def test_a_shorter_text_is_the_beginning_of_a_longer_one(task_of: Any) -> None:
    words = task_of("sb_copy_passage", "byte_level_bpe").words
    short, long = words.text(500, "a"), words.text(5000, "a")
    assert (len(short), len(long)) == (500, 5000)
    assert (long[:500] == short).all()


class OnSequences(PartialModel):
    """Gives targets their log-probabilities by what the inputs alone tell."""

    @abc.abstractmethod
    def expect(self, sequence: TargetSequence) -> tuple[np.ndarray, np.ndarray]:
        """Returns log-probabilities of the targets, and whether each is the most probable token."""

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        return [TargetLogprobs(*self.expect(resolve_sequence(request.args[0]))) for request in requests]


class Copies(OnSequences):
    """Predicts what followed the last time that the last tokens stood in the text; is all but sure."""

    def expect(self, sequence: TargetSequence) -> tuple[np.ndarray, np.ndarray]:
        inputs, positions, targets = sequence
        right = np.zeros(len(targets), dtype=bool)
        for number, (position, target) in enumerate(zip(positions.tolist(), targets.tolist(), strict=True)):
            alike = np.flatnonzero(inputs[:position] == inputs[position])
            for back in range(1, 40):
                nearer = alike[(alike >= back) & (inputs[alike - back] == inputs[position - back])]
                if not len(nearer):
                    break
                alike = nearer
            right[number] = len(alike) > 0 and inputs[alike[-1] + 1] == target
        return np.where(right, -0.001, -9.0).astype(np.float32), right


class ReadsMarks(OnSequences):
    """Lists the marked words in their order; is all but sure."""

    def __init__(self, mark: list[int], end: list[int]) -> None:
        super().__init__()
        self.mark, self.end = mark, end

    def expect(self, sequence: TargetSequence) -> tuple[np.ndarray, np.ndarray]:
        inputs, _, targets = sequence
        text, listed = inputs.tolist(), []
        for place in range(len(text) - len(self.mark)):
            if text[place : place + len(self.mark)] == self.mark:
                start = stop = place + len(self.mark)
                while text[stop : stop + len(self.end)] != self.end:
                    stop += 1
                listed += text[start:stop]
        right = np.array(listed[: len(targets)]) == targets
        return np.where(right, -0.001, -9.0).astype(np.float32), right


class KnowsTheWords(OnSequences):
    """Knows which words there are, and nothing of the text."""

    def __init__(self, words: WordList) -> None:
        super().__init__()
        self.shares = Counter(tuple(one[:n].tolist()) for one in words.tokens for n in range(len(one) + 1))
        self.whole = {tuple(one.tolist()) for one in words.tokens}

    def expect(self, sequence: TargetSequence) -> tuple[np.ndarray, np.ndarray]:
        logprobs, word = [], ()
        for target in sequence.targets_T.tolist():
            logprobs.append(math.log(self.shares[*word, target] / self.shares[word]))
            word = () if (*word, target) in self.whole else (*word, target)
        return np.array(logprobs, dtype=np.float32), np.zeros(len(logprobs), dtype=bool)


@pytest.mark.parametrize("name", [FORMS[0], *exhaustive(*FORMS[1:])])
def test_copying_is_all_it_takes_and_guessing_gives_the_level_of_a_guess(folder: Path, name: str) -> None:
    options = {"tokenizer": str(folder / "byte_level_bpe"), "context_lengths": [1500, 3000]}
    task = load_task(name, options)
    reads = {"sb_copy_selective": lambda: ReadsMarks(task._mark, task._end_of_mark)}.get(name, Copies)
    copied, guessed = (
        evaluated(model, [name], options, limit=3)["results"][name] for model in (reads(), KnowsTheWords(task.words))
    )
    for key in task.means():
        if key.startswith("exact_match"):
            assert (copied[f"{key},none"], guessed[f"{key},none"]) == (1.0, 0.0)
        elif key.startswith("answer_nll"):
            assert copied[f"{key},none"] < 0.01
            chance = guessed[f"{key.replace('answer_nll', 'chance')},none"]
            assert guessed[f"{key},none"] == pytest.approx(-math.log(chance), rel=1e-5)
        elif key.startswith("retrieval_gain"):
            assert copied[f"{key},none"] > 9.0
            assert guessed[f"{key},none"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_no_word_is_the_beginning_of_another(task_of: Any, kind: str) -> None:
    words = [tuple(one.tolist()) for one in task_of("sb_copy_passage", kind).words.tokens]
    assert len(words) == len(set(words)) > 1000
    beginnings = {word[:count] for word in words for count in range(1, len(word))}
    assert not beginnings & set(words)
