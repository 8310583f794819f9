"""RULER's scores: substring matches without regard to case, after its clean-up of the answer."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def parse_answer(answer: str) -> str:
    """Cleans a generated answer as RULER does: outer white space off, control characters turned into line breaks."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Returns the share of references found in the answer, 0 to 1."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """Returns 1 where any reference is found in the answer, else 0; references are aliases of one answer."""
    return float(any(reference.lower() in answer.lower() for reference in references))
