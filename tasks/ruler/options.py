"""What a user chooses with `--metadata` for RULER's tasks."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from sbeval.settings import (
    MOST_COUNTED,
    Count,
    Expected,
    Flag,
    PathText,
    Tokens,
    WholeNumber,
    as_number,
    as_whole,
    number,
    whole,
)
from sbeval.tasks.draws import NeedleType
from sbeval.tasks.metadata import SampleOptions, doublings

GRID_DEPTHS = 11


class RulerOptions(SampleOptions):
    """Options of every RULER task: samples, and local copies of the texts."""

    title = "RULER: sb_ruler"
    default_lengths = doublings(4096, 131072)

    essays: PathText | None = Field(
        default=None, description="Text file or folder of essays; None takes them from the hub."
    )
    squad: PathText | None = Field(default=None, description="File in the layout of SQuAD 2; None takes the hub's.")
    hotpot: PathText | None = Field(default=None, description="File in the layout of HotpotQA; None takes the hub's.")
    answer_prefix: Flag = Field(
        default=True,
        description="Whether an answer's beginning is given, as RULER does: at the end of the prompt, in a chat as the "
        "beginning of the model's own message, and behind its thinking where it thinks.",
    )
    thinking_tokens: Tokens | None = Field(
        default=None,
        description="An argument of the model, for which tasks keep room beside the context length.",
    )
    scripts: Literal["nvidia"] | None = Field(
        default=None, description='"nvidia" fills and words prompts as NVIDIA\'s scripts do; None fills them up.'
    )


def _depths(value: Any) -> tuple[float, ...] | None:
    if value is None or value == "random":
        return None
    if isinstance(value, list | tuple) and value:
        return tuple(as_number(depth, lambda percent: 0 <= percent <= 100) for depth in value)
    count = GRID_DEPTHS if value == "grid" else as_whole(value, 2, MOST_COUNTED)
    return tuple(round(100 * i / (count - 1), 6) for i in range(count))


class PlacedOptions(RulerOptions):
    """Options of tasks whose needles have depths."""

    title = "needles by depth: sb_niah, sb_niah_forced, sb_json_kv, sb_association, sb_turns"

    depths: Annotated[
        tuple[float, ...] | None,
        Expected('"random", "grid", a number of depths of at least 2, or a list of percents from 0 to 100', _depths),
    ] = Field(
        default=None,
        description="Depths in percent that the samples' first asked needle goes through in turn: a list of them, a "
        f'number of depths spread evenly, "grid" for {GRID_DEPTHS}, or "random" for RULER\'s random depths.',
    )


class NiahOptions(PlacedOptions):
    """Options of a needle task."""

    title = "needles: sb_niah, sb_niah_forced, sb_json_kv"

    type_haystack: Literal["noise", "needle", "essay"] = Field(description="What the needles lie in.")
    type_needle_k: NeedleType = Field(description="What keys are.")
    type_needle_v: NeedleType = Field(description="What values are.")
    num_needle_k: Count = Field(description="Keys in the haystack.")
    num_needle_v: Count = Field(description="Values of a key.")
    num_needle_q: Count = Field(description="Keys asked for.")


class VtOptions(RulerOptions):
    """Options of variable tracking."""

    title = "variable tracking: sb_ruler_vt"

    type_haystack: Literal["noise", "essay"] = Field(description="What the assignments lie in.")
    num_chains: Count = Field(description="Chains of assignments.")
    num_hops: Count = Field(description="Assignments of a chain behind its first.")
    num_fewshot: WholeNumber = Field(description="Worked examples before the question.")


class CweOptions(RulerOptions):
    """Options of common-words extraction."""

    title = "common words: sb_ruler_cwe"

    freq_cw: Count = Field(description="How often a common word comes.")
    freq_ucw: Count = Field(description="How often any other word comes.")
    num_cw: Count = Field(description="Common words, all of them asked for.")
    num_fewshot: WholeNumber = Field(description="Worked examples before the question.")


class FweOptions(RulerOptions):
    """Options of frequent-words extraction."""

    title = "frequent words: sb_ruler_fwe"

    alpha: Annotated[float, number("a number above 1", lambda alpha: 1 < alpha < math.inf)] = Field(
        description="Exponent by which counts fall off with rank."
    )
    coded_wordlen: Annotated[int, whole(3)] = Field(description="Letters of a word.")
    vocab_size: WholeNumber = Field(description="Words to draw from; 0 is RULER's one for every 50 tokens.")


class QaOptions(RulerOptions):
    """Options of a question-answering task."""

    fixed = frozenset({"dataset"})

    dataset: Literal["squad", "hotpotqa"] = Field(description="Whose questions are asked.")
