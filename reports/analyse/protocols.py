"""Sentences that tell a reader what curves and differences of NLL show under each perplexity protocol.

A protocol decides which tokens are scored at each context length. A difference of NLL between two context lengths shows
that a model uses the longer context only if the same tokens are scored at both lengths and only the context before them
differs (protocols `IDENTICAL_TARGETS`). Every sentence that is true only then passes through `on_identical_targets`,
which raises an error for any other protocol.
"""

from typing import NamedTuple

from sbeval.results.records import IDENTICAL_TARGETS

PROTOCOL_ORDER = (*IDENTICAL_TARGETS, "stream", "sliding", "rolling")
_CURVES = {
    "fixed_target": "The same target tokens at every length: a drop is what the extra context is worth.",
    "pairs": "Targets from a file, each after the end of its context; the context length counts only the context.",
    "riffled": "The last piece of a document; in its context, pieces of this document alternate with those of others.",
    "stream": "Text in disjoint windows: shows whether a model breaks, not whether it uses context.",
    "sliding": "Text in overlapping windows, each of which scores only the targets that are new in it.",
    "rolling": "Each document separately, in windows of this length; one that fits a window changes no further.",
}


class DifferenceText(NamedTuple):
    """Sentences on what NLL at a context length minus NLL at the reference length (the training length) shows.

    Attributes:
        longer: the sentence on lengths longer than the reference length.
        shorter: the sentence on shorter lengths; may be empty.
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


def curve_text(protocol: str) -> str:
    """Returns a sentence on what a curve of NLL over context lengths shows; empty for an unknown protocol."""
    return _CURVES.get(protocol, "")


def difference_text(protocol: str) -> DifferenceText:
    """Returns sentences on what differences of NLL between lengths show.

    For an unknown protocol they do not say whether a model uses its context.
    """
    if protocol in IDENTICAL_TARGETS:
        return DifferenceText(
            longer=on_identical_targets(protocol, "Below zero at a longer length, the longer context helps."),
            shorter=on_identical_targets(protocol, "Above zero at a shorter length, the missing context costs."),
            brief=on_identical_targets(protocol, "Below zero at a longer length, it helps."),
        )
    behind = ", since most targets have less context than the length says" if protocol in _CURVES else ""
    return DifferenceText(
        longer=(
            "Above zero at a longer length, the model is worse there. Below zero does not show that it uses the longer "
            f"context{behind}."
        ),
        shorter="",
        brief="Below zero does not show use of context.",
    )


def windows_text(protocol: str) -> str:
    """Returns the first words of a sentence about a protocol without identical targets, such as "In stream windows"."""
    return f"In {protocol.replace('_', ' ')} windows"
