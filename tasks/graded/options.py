"""The options of graded tasks, which a user sets with `--metadata`."""

from typing import Literal, get_args

from pydantic import Field

from sbeval.settings import Count, Flag, WholeNumber
from sbeval.tasks.ruler.options import QaOptions, RulerOptions

Level = Literal["basic", "easy", "medium", "hard"]
LEVELS: tuple[Level, ...] = get_args(Level)
Form = Literal["direct", "steps", "choice"]


class GradedOptions(RulerOptions):
    """Options of every graded task; the YAML file sets `level` and `form`."""

    fixed = frozenset({"level", "form"})
    refused = frozenset({"scripts"})

    level: Level = Field(description="Name of the level.")
    form: Form = Field(description="Form of the answer.")


class GradedNeedleOptions(GradedOptions):
    """Options of graded needles."""

    title = "graded needles: sb_graded_needle"

    others: Literal["none", "few", "all"] = Field(
        description="Lines of the haystack that are needles with other keys: none, one of eight, or all."
    )
    near_keys: WholeNumber = Field(description="Further needles whose keys share a word with the key of the question.")


class GradedVariablesOptions(GradedOptions):
    """Options of graded variable tracking."""

    title = "graded variables: sb_graded_variables"

    hops: Count = Field(description="Boxes that hold what an earlier box holds, in each chain; at most 8.")
    other_chains: WholeNumber = Field(description="Chains of boxes with other values; at most 7.")


class GradedWordsOptions(GradedOptions):
    """Options of graded frequent words."""

    title = "graded words: sb_graded_words"

    asked: Count = Field(description="Number of frequent words; all are the answer.")
    frequent_repeats: Count = Field(description="Number of occurrences of each frequent word.")
    other_repeats: Count = Field(description="Number of occurrences of every other word.")


class GradedQaOptions(GradedOptions, QaOptions):
    """Options of graded question answering."""

    title = "graded questions: sb_graded_qa"
    fixed = GradedOptions.fixed | QaOptions.fixed

    hint: Flag = Field(description="Whether the question names the beginning of the document with the answer.")
    same_article: Flag = Field(description="Whether the other documents of the article are in the prompt.")
    questions: Count = Field(description="Questions that are asked at once: 1 or 2.")
