"""Questions, and the three forms of answers to them: direct, in two steps, and as a choice among four."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sbeval.tasks.draws import seeded_random
from sbeval.tasks.graded.options import Form
from sbeval.tasks.graded.scores import ANSWER_CUE, FOUND_CUE, LETTERS


class Question(NamedTuple):
    """A question about a sample's text.

    Attributes:
        text: the question.
        answers: its right answers, of which one is enough.
        evidence: the text of a right first step.
        first_step: a description of the first step, behind "write a line that".
        wrong: three wrong answers.
    """

    text: str
    answers: Sequence[str]
    evidence: str
    first_step: str
    wrong: Sequence[str]


class Ending(NamedTuple):
    """The end of a prompt, and the answers to it.

    Attributes:
        closing: the text with the question.
        answer_prefix: the beginning of the answer.
        references: the right answers: texts, or the letter of a choice.
        choices: the four answers of a choice in their order; empty in other forms.
    """

    closing: str
    answer_prefix: str
    references: Sequence[str]
    choices: Sequence[str] = ()


def two_by_two(values: Sequence[tuple[str, str]], join: Callable[[Sequence[str]], str]) -> list[str]:
    """Returns the three wrong answers with the other value in one or in both of two places.

    Args:
        values: for each of two places, its right value and another one.
        join: makes an answer from both values.
    """
    (first, other_first), (second, other_second) = values
    return [join(pair) for pair in ((other_first, second), (first, other_second), (other_first, other_second))]


def ending(question: Question, form: Form, *name: object) -> Ending:
    """Returns the end of a prompt with a question in one of the forms; `name` seeds the order of choices."""
    if form == "steps":
        closing = (
            f'{question.text}\nFirst write a line that begins with "{FOUND_CUE}" and {question.first_step}. Then write '
            f'a line that begins with "{ANSWER_CUE}" and gives only the answer.'
        )
        return Ending(closing, FOUND_CUE, question.answers)
    if form == "direct":
        return Ending(f"{question.text}\nGive only the answer, in one line.", ANSWER_CUE, question.answers)
    choices = [question.answers[0], *question.wrong]
    seeded_random(*name, "choices").shuffle(choices)
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    closing = f"{question.text}\n{listed}\nGive only the letter of the right answer."
    return Ending(closing, ANSWER_CUE, [LETTERS[choices.index(question.answers[0])]], choices)
