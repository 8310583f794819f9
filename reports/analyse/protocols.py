"""What the numbers of a protocol allow to be said: sentences that do not hold for every protocol, once.

A difference between two lengths shows that a model uses the longer context only where the targets are identical and
nothing but the context before them differs (`IDENTICAL_TARGETS`). Sentences that rest on this pass through
`on_identical_targets`, which refuses every other protocol.
"""

from typing import NamedTuple

from sbeval.results.records import IDENTICAL_TARGETS

PROTOCOL_ORDER = (*IDENTICAL_TARGETS, "stream", "sliding", "rolling")
_CURVES = {
    "fixed_target": "The same target tokens at every length: a drop is what the extra context is worth.",
    "pairs": "Targets of a file behind the end of their contexts; a context length counts context alone.",
    "riffled": "The last piece of a document, behind its own pieces in turn with those of other documents.",
    "stream": "Text in disjoint windows: shows whether a model breaks, not whether it uses context.",
    "sliding": "Text in overlapping windows, each of which scores only the targets that are new in it.",
    "rolling": "Each document alone, in windows of the given length: a document shorter than that changes no further.",
}


class DifferenceWords(NamedTuple):
    """How to read NLL at a length minus NLL at the reference.

    Attributes:
        longer: at lengths beyond the reference.
        shorter: at lengths below it; empty where nothing is to be said.
        brief: the same in a few words, for the line above an image.
    """

    longer: str
    shorter: str
    brief: str


def on_identical_targets(protocol: str, sentence: str) -> str:
    """Returns a sentence that holds only where the targets are identical at every length.

    Raises:
        ValueError: the protocol scores other targets, or the same ones behind unequal contexts.
    """
    if protocol not in IDENTICAL_TARGETS:
        raise ValueError(f"expected a protocol of identical targets, found {protocol!r} for {sentence!r}")
    return sentence


def curve_words(protocol: str) -> str:
    """Returns how to read a curve over lengths; empty for a protocol that is not known."""
    return _CURVES.get(protocol, "")


def difference_words(protocol: str) -> DifferenceWords:
    """Returns how to read differences between lengths; of a protocol that is not known nothing is claimed."""
    if protocol in IDENTICAL_TARGETS:
        return DifferenceWords(
            longer=on_identical_targets(protocol, "Below zero at a longer length, the longer context helps."),
            shorter=on_identical_targets(protocol, "Above zero at a shorter length, the missing context costs."),
            brief=on_identical_targets(protocol, "Below zero at a longer length, it helps."),
        )
    behind = ", since most targets stand behind fewer tokens than the length says" if protocol in _CURVES else ""
    return DifferenceWords(
        longer=(
            "Above zero at a longer length, the model is worse there. Below zero does not show that it uses the longer "
            f"context{behind}."
        ),
        shorter="",
        brief="Below zero does not show use of context.",
    )


def windows_words(protocol: str) -> str:
    """Names the windows of a protocol without identical targets, as a sentence about them begins."""
    return f"In {protocol.replace('_', ' ')} windows"
