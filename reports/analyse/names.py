"""Names of models in sentences: one that holds a comma stands in quotes, so that a list of names stays a list."""

import re
from collections.abc import Iterable

_UNCLEAR = re.compile(r"[,;]|: | and ")


def in_words(label: str) -> str:
    """Returns a name as it stands in a sentence."""
    if not _UNCLEAR.search(label):
        return label
    return f"\N{LEFT DOUBLE QUOTATION MARK}{label}\N{RIGHT DOUBLE QUOTATION MARK}"


def name_list(labels: Iterable[str], *, at_most: int | None = None) -> str:
    """Joins names; of more than `at_most` the last are counted."""
    names = [in_words(label) for label in labels]
    if at_most is not None and len(names) > at_most:
        names = [*names[: at_most - 1], f"{len(names) - at_most + 1} others"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
