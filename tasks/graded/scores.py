"""Scores of graded answers: exact match, soft match (1 - WER), and the parts of an answer in each form."""

import re
from collections.abc import Sequence

LETTERS = ("A", "B", "C", "D")
FOUND_CUE, ANSWER_CUE = "Found:", "Answer:"
_WORD = re.compile(r"\w+")
_FIRST_LETTER = re.compile(r"\W*([A-D])\b")
_ANY_LETTER = re.compile(r"\b([A-D])\b")


def words_of(text: str) -> list[str]:
    """Returns the words of a text: runs of letters, digits and underscores, without upper case."""
    return _WORD.findall(text.casefold())


def word_edits(answer: Sequence[str], reference: Sequence[str]) -> int:
    """Returns the Levenshtein distance: the least number of words to insert, remove or replace."""
    row = list(range(len(reference) + 1))
    for place, word in enumerate(answer, 1):
        before, row[0] = row[0], place
        for column, wanted in enumerate(reference, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (word != wanted))
    return row[-1]


def soft_match(answer: str, references: Sequence[str]) -> float:
    """Returns 1 minus the word error rate (WER), clamped to 0 to 1; of several references the best counts.

    WER is the number of word edits from answer to reference, divided by the number of words of the reference. For a
    reference without words the soft match is the exact match.
    """
    answered = words_of(answer)
    scores = []
    for reference in references:
        wanted = words_of(reference)
        errors = word_edits(answered, wanted) / len(wanted) if wanted else float(answered != wanted)
        scores.append(min(1.0, max(0.0, 1.0 - errors)))
    return max(scores)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if the answer has the words of any reference in its order and no others, else 0."""
    return float(words_of(answer) in [words_of(reference) for reference in references])


def direct_answer(answer: str) -> str:
    """Returns the first line of a generated answer, without the word that introduces it."""
    first, *_ = answer.strip().split("\n")
    return first.strip().removeprefix(ANSWER_CUE).strip()


def two_steps(answer: str) -> tuple[str, str]:
    """Splits a generated answer into its first step and the line behind "Answer:"; the latter is "" without a cue."""
    found, _, behind = answer.partition(ANSWER_CUE)
    return found.strip().removeprefix(FOUND_CUE).strip(), direct_answer(behind)


def chosen_letter(answer: str) -> str:
    """Returns the letter of a choice: the one at the beginning of an answer, else the last one in it; "" for none."""
    if (first := _FIRST_LETTER.match(answer)) is not None:
        return first[1]
    letters: list[str] = _ANY_LETTER.findall(answer)
    return letters[-1] if letters else ""
