"""Sentences about perplexity protocols: how to read curves and differences, which depends on the protocol.

A difference between two context lengths shows that a model uses the longer context only if the targets are identical
and nothing but the context before them differs (protocols `IDENTICAL_TARGETS`). Every sentence that needs this passes
through `on_identical_targets`, which raises an error for any other protocol.
"""

from typing import NamedTuple

from sbeval.results.records import IDENTICAL_TARGETS

PROTOCOL_ORDER = (*IDENTICAL_TARGETS, "stream", "sliding", "rolling")
_CURVES = {
    "fixed_target": "The same target tokens at every length: a drop is what the extra context is worth.",
    "pairs": "Targets from a file, each after the end of its context; the context length counts only the context.",
    "riffled": "The last chunk of a document; its context alternates chunks of this document with those of others.",
    "stream": "Text in disjoint windows: shows whether a model breaks, not whether it uses context.",
    "sliding": "Text in overlapping windows, each of which scores only the targets that are new in it.",
    "rolling": "Each document by itself, in windows of the given length; one that fits a window changes no further.",
}


class DifferenceWords(NamedTuple):
    """Sentences on how to read NLL at a length minus NLL at the reference length.

    Attributes:
        longer: for lengths longer than the reference.
        shorter: for shorter lengths; may be empty.
        brief: a short version, for the subtitle of an image.
    """

    longer: str
    shorter: str
    brief: str


def on_identical_targets(protocol: str, sentence: str) -> str:
    """Returns the sentence unchanged after checking that the protocol scores identical targets at every length.

    Raises:
        ValueError: the protocol is not one of `IDENTICAL_TARGETS`, so the sentence would be wrong.
    """
    if protocol not in IDENTICAL_TARGETS:
        raise ValueError(f"expected a protocol with identical targets, found {protocol!r} for {sentence!r}")
    return sentence


def curve_words(protocol: str) -> str:
    """Returns how to read a curve over context lengths; empty for an unknown protocol."""
    return _CURVES.get(protocol, "")


def difference_words(protocol: str) -> DifferenceWords:
    """Returns how to read differences between lengths; for an unknown protocol, without a claim on use of context."""
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
    """Returns the beginning of a sentence about a protocol without identical targets, such as "In stream windows"."""
    return f"In {protocol.replace('_', ' ')} windows"
