"""The options of RULER's tasks, which a user sets with `--metadata`."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from sbeval.errors import UserError
from sbeval.settings import (
    MOST_COUNTED,
    Count,
    Expected,
    Flag,
    PathText,
    Share,
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
TooLong = Literal["refuse", "leave_out", "truncate"]


class RulerOptions(SampleOptions):
    """Options of every RULER task: samples, local copies of texts, and the form of the prompt."""

    title = "RULER: sb_ruler"
    default_lengths = doublings(4096, 131072)
    refused: ClassVar[frozenset[str]] = frozenset()
    """Options that a task does not have; only their default is accepted."""

    essays: PathText | None = Field(
        default=None, description="Text file or folder of essays; None takes them from the hub."
    )
    squad: PathText | None = Field(default=None, description="File in the layout of SQuAD 2; None downloads SQuAD 2.")
    hotpot: PathText | None = Field(
        default=None, description="File in the layout of HotpotQA; None downloads HotpotQA."
    )
    answer_prefix: Flag = Field(
        default=True,
        description="Whether the model gets the beginning of its answer, as in RULER: at the end of the prompt, in a "
        "chat at the start of the model's message, and after its thinking if it thinks.",
    )
    thinking_tokens: Tokens | None = Field(
        default=None,
        description="Tokens reserved for thinking, in addition to the context length: an argument of the model that "
        "tasks read too.",
    )
    scripts: Literal["nvidia"] | None = Field(
        default=None,
        description='"nvidia" fills and words prompts as NVIDIA\'s scripts do; None fills prompts to their budget.',
    )
    too_long: TooLong = Field(
        default="refuse",
        description='What becomes of a sample whose prompt does not fit a length: "refuse" leaves the length out for '
        'all samples, "leave_out" leaves the sample out there, and "truncate" removes the middle of its text.',
    )

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task.

        Raises:
            UserError: as in `SampleOptions.of_task`, or an option is set that the task does not have.
        """
        options = super().of_task(task, metadata, definition)
        for name in sorted(cls.refused):
            if (value := getattr(options, name)) != cls.model_fields[name].default:
                raise UserError(
                    f"{task} has no option {name}, which is {value!r}: set it under the names of other tasks."
                )
        return options


def _depths(value: Any) -> tuple[float, ...] | None:
    if value is None or value == "random":
        return None
    if isinstance(value, list | tuple) and value:
        return tuple(as_number(depth, lambda percent: 0 <= percent <= 100) for depth in value)
    count = GRID_DEPTHS if value == "grid" else as_whole(value, 2, MOST_COUNTED)
    return tuple(round(100 * i / (count - 1), 6) for i in range(count))


class PlacedOptions(RulerOptions):
    """Options of tasks whose needles can be placed at chosen depths."""

    title = "needles by depth: sb_niah, sb_niah_forced, sb_json_kv, sb_association, sb_turns"

    depths: Annotated[
        tuple[float, ...] | None,
        Expected('"random", "grid", a number of depths of at least 2, or a list of percents from 0 to 100', _depths),
    ] = Field(
        default=None,
        description="Depths in percent of the first needle that the question is about; samples take them in turn: a "
        f'list, a number of evenly spaced depths, "grid" for {GRID_DEPTHS} of them, or "random" for RULER\'s random '
        "depths.",
    )
    absent: Share = Field(
        default=0.0,
        description="Share of samples that ask for a key that is not in the text; every prompt then says what the "
        'answer is in that case ("none").',
    )


class NiahOptions(PlacedOptions):
    """Options of a needle task."""

    title = "needles: sb_niah, sb_niah_forced, sb_json_kv"

    type_haystack: Literal["noise", "needle", "essay"] = Field(description="Text around the needles.")
    type_needle_k: NeedleType = Field(description="Type of the keys.")
    type_needle_v: NeedleType = Field(description="Type of the values.")
    num_needle_k: Count = Field(description="Number of keys in the haystack.")
    num_needle_v: Count = Field(description="Number of values for each key.")
    num_needle_q: Count = Field(description="Number of keys in the question.")


class VtOptions(RulerOptions):
    """Options of variable tracking."""

    title = "variable tracking: sb_ruler_vt"

    type_haystack: Literal["noise", "essay"] = Field(description="Text around the assignments.")
    num_chains: Count = Field(description="Number of chains of assignments.")
    num_hops: Count = Field(description="Number of assignments in a chain after its first.")
    num_fewshot: WholeNumber = Field(description="Number of worked examples before the question.")


class CweOptions(RulerOptions):
    """Options of common-words extraction."""

    title = "common words: sb_ruler_cwe"

    freq_cw: Count = Field(description="Number of occurrences of each common word.")
    freq_ucw: Count = Field(description="Number of occurrences of every other word.")
    num_cw: Count = Field(description="Number of common words; all are answers.")
    num_fewshot: WholeNumber = Field(description="Number of worked examples before the question.")


class FweOptions(RulerOptions):
    """Options of frequent-words extraction."""

    title = "frequent words: sb_ruler_fwe"

    alpha: Annotated[float, number("a number above 1", lambda alpha: 1 < alpha < math.inf)] = Field(
        description="Exponent of the power law by which counts fall with rank."
    )
    coded_wordlen: Annotated[int, whole(3)] = Field(description="Number of letters in a word.")
    vocab_size: WholeNumber = Field(description="Number of different words; 0 means RULER's one for every 50 tokens.")


class QaOptions(RulerOptions):
    """Options of a question-answering task."""

    fixed = frozenset({"dataset"})

    dataset: Literal["squad", "hotpotqa"] = Field(description="Data set of the questions.")
