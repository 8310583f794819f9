"""The options of recall tasks and attention spans, which a user sets with `--metadata`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from sbeval.settings import MOST_COUNTED, Count, Counted, Counts, Expected, PathText, Share, as_counts, whole
from sbeval.tasks.metadata import SampleOptions, doublings
from sbeval.tasks.perplexity.options import CorpusOptions
from sbeval.tasks.recall.sequences import LENGTH_TOKENS, PAIRS, VOCABULARY
from sbeval.tasks.ruler.options import PlacedOptions, RulerOptions, TooLong

CUE_WORDS = 3
SHORTEST_DISTANCE = 128
Examples = Literal["trec", "trec_fine", "banking77", "clinc150", "nlu", "file"]


class MqrarTextOptions(SampleOptions):
    """Options of multi-query repeated associative recall (MQRAR) as text."""

    title = "associative recall: sb_mqrar, sb_mqrar_text"
    default_lengths = doublings(1024, 16384)

    num_samples: Counted = Field(default=100, description="Samples of each condition.")
    pairs: Counts = Field(default=(4, 16), description="Numbers of names in a text; each number is a condition.")
    n_back: Counts = Field(
        default=(1,), description="Which value of a name is the answer: 1 is its latest, 2 the one before, and so on."
    )


class MqrarOptions(MqrarTextOptions):
    """Options of MQRAR over token ids."""

    title = "sb_mqrar, where it differs from sb_mqrar_text"
    default_lengths = (LENGTH_TOKENS,)

    num_samples: Counted = Field(default=200, description="Samples of each condition.")
    pairs: Counts = Field(default=PAIRS, description="Numbers of keys in a sequence; each number is a condition.")
    vocabulary: Annotated[int, whole(6, most=MOST_COUNTED)] = Field(
        default=VOCABULARY, description="Number of token ids in use."
    )


class FlipFlopOptions(SampleOptions):
    """Options of flip-flop language modelling."""

    title = "flip-flops: sb_flipflop"
    default_lengths = doublings(512, 16384)

    num_samples: Counted = Field(default=100, description="Samples at each length.")
    ignore_share: Share = Field(default=0.8, description="Share of instructions that the model has to ignore.")


class AlgorithmOptions(SampleOptions):
    """Options of algorithms over token ids."""

    title = "algorithms over token ids: sb_algorithm"
    default_lengths = doublings(64, 65536)

    num_samples: Counted = Field(default=100, description="Samples at each length.")


class CopyOptions(SampleOptions):
    """Options of every copying task."""

    title = "copying: sb_copy"
    default_lengths = doublings(1024, 131072)

    num_samples: Counted = Field(default=100, description="Samples at each length.")


class PassageOptions(CopyOptions):
    """Options of the task that repeats the passage at the beginning of the text at its end."""

    title = "a passage: sb_copy_passage"

    passage_words: Annotated[int, whole(CUE_WORDS + 1)] = Field(
        default=32, description=f"Words in the passage; all but its first {CUE_WORDS} are scored."
    )


class SelectiveOptions(CopyOptions):
    """Options of selective copying."""

    title = "marked words: sb_copy_selective"

    marked_words: Count = Field(default=16, description="Words that are marked in the text and scored at its end.")


class PhraseOptions(CopyOptions):
    """Options of the task that repeats phrases at several distances."""

    title = "phrases by distance: sb_copy_phrase"

    phrase_words: Annotated[int, whole(CUE_WORDS + 1)] = Field(
        default=8, description=f"Words in a phrase; all but its first {CUE_WORDS} are scored."
    )
    phrases: Count = Field(default=2, description="Phrases in a sample for each distance.")
    distances: Counts | None = Field(
        default=None,
        description="Distances in tokens from a phrase to its repetition; None takes the powers of two from "
        f"{SHORTEST_DISTANCE} to half the context length.",
    )


class ManyShotOptions(RulerOptions):
    """Options of many-shot classification."""

    title = "many-shot classification: sb_many_shot"

    examples: Examples = Field(description="Data set of labelled texts.")
    trec: PathText | None = Field(default=None, description="Local copy of CogComp/trec; None takes the hub's.")
    banking77: PathText | None = Field(
        default=None, description="Local copy of PolyAI/banking77; None takes the hub's."
    )
    clinc150: PathText | None = Field(default=None, description="Local copy of clinc/clinc_oos; None takes the hub's.")
    nlu: PathText | None = Field(
        default=None, description="Local copy of xingkunliuxtracta/nlu_evaluation_data; None takes the hub's."
    )
    examples_file: PathText | None = Field(
        default=None, description="File of labelled texts for sb_many_shot_file, with the columns text and label."
    )


class AssociationOptions(PlacedOptions):
    """Options of the task whose needles share no word with the question."""

    title = "needles without a shared word: sb_association"

    type_haystack: Literal["noise", "essay"] = Field(description="Text around the sentences about people.")
    people: Annotated[int, whole(2)] = Field(description="People in the text; one of them is the answer.")
    associations: PathText | None = Field(
        default=None,
        description='A .jsonl file with the fields shown and asked, such as "the Louvre" and "Paris"; '
        "None takes the packaged list.",
    )


class TurnsOptions(PlacedOptions):
    """Options of the retrieval of the n-th of several turns with the same request."""

    title = "the n-th of several turns: sb_turns"

    same_turns: Annotated[int, whole(2)] = Field(description="Turns with the same request; one of them is the answer.")


class LongBenchOptions(RulerOptions):
    """Options of LongBench v2."""

    title = "LongBench v2 by length: sb_longbench2"

    too_long: TooLong = Field(
        default="truncate",
        description='What becomes of a question whose text does not fit: "truncate" removes its middle as the '
        'benchmark\'s authors do, "leave_out" leaves the question out at that length, and "refuse" leaves the length '
        "out.",
    )
    stratum: Literal["short", "medium", "long"] = Field(description="Length class of the texts.")
    longbench2: PathText | None = Field(default=None, description="Local copy of LongBench v2; None takes the hub's.")


def _from_two(value: Any) -> tuple[int, ...]:
    if (lengths := as_counts(value))[0] < 2:
        raise ValueError
    return lengths


class SpanOptions(CorpusOptions):
    """Options of the attention-span task."""

    title = "attention spans: sb_span"
    default_lengths = doublings(512, 16384)

    context_lengths: Annotated[tuple[int, ...], Expected("a list of at least 2 tokens each", _from_two)] | None = Field(
        default=None,
        description="Context lengths in tokens, at least 2, since the first position has no key before it; None takes "
        "the task's defaults that the model allows.",
    )
    num_samples: Counted = Field(default=8, description="Blocks of text at each length.")
    queries: Counted = Field(default=64, description="Queries whose attention is measured in a block.")
