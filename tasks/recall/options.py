"""What a user chooses with `--metadata` for the recall tasks and attention spans."""

from typing import Annotated, Any, Literal

from pydantic import Field

from sbeval.settings import MOST_COUNTED, Count, Counted, Counts, Expected, PathText, Share, as_counts, whole
from sbeval.tasks.metadata import SampleOptions, doublings
from sbeval.tasks.perplexity.options import CorpusOptions
from sbeval.tasks.recall.sequences import LENGTH_TOKENS, PAIRS, VOCABULARY
from sbeval.tasks.ruler.options import PlacedOptions, RulerOptions

CUE_WORDS = 3
SHORTEST_DISTANCE = 128
Examples = Literal["trec", "trec_fine", "banking77", "clinc150", "nlu", "file"]


class MqrarTextOptions(SampleOptions):
    """Options of associative recall as text."""

    title = "associative recall: sb_mqrar, sb_mqrar_text"
    default_lengths = doublings(1024, 16384)

    num_samples: Counted = Field(default=100, description="Samples of each condition.")
    pairs: Counts = Field(default=(4, 16), description="Names in the text, one condition for each number.")
    n_back: Counts = Field(default=(1,), description="How many assignments ago the value asked for was given.")


class MqrarOptions(MqrarTextOptions):
    """Options of associative recall over token ids."""

    title = "sb_mqrar, where it differs from sb_mqrar_text"
    default_lengths = (LENGTH_TOKENS,)

    num_samples: Counted = Field(default=200, description="Samples of each condition.")
    pairs: Counts = Field(default=PAIRS, description="Keys of a sequence, one condition for each number.")
    vocabulary: Annotated[int, whole(6, most=MOST_COUNTED)] = Field(default=VOCABULARY, description="Token ids in use.")


class FlipFlopOptions(SampleOptions):
    """Options of flip-flop language modelling."""

    title = "flip-flops: sb_flipflop"
    default_lengths = doublings(512, 16384)

    num_samples: Counted = Field(default=100, description="Samples at each length.")
    ignore_share: Share = Field(default=0.8, description="Share of the instructions that are to be ignored.")


class CopyOptions(SampleOptions):
    """Options of every copying task."""

    title = "copying: sb_copy"
    default_lengths = doublings(1024, 131072)

    num_samples: Counted = Field(default=100, description="Samples at each length.")


class PassageOptions(CopyOptions):
    """Options of the repeated passage."""

    title = "a passage: sb_copy_passage"

    passage_words: Annotated[int, whole(CUE_WORDS + 1)] = Field(
        default=32, description=f"Words of the passage; all but its first {CUE_WORDS} are asked for."
    )


class SelectiveOptions(CopyOptions):
    """Options of selective copying."""

    title = "marked words: sb_copy_selective"

    marked_words: Count = Field(default=16, description="Words marked in the text, and asked for in their order.")


class PhraseOptions(CopyOptions):
    """Options of phrases by distance."""

    title = "phrases by distance: sb_copy_phrase"

    phrase_words: Annotated[int, whole(CUE_WORDS + 1)] = Field(
        default=8, description=f"Words of a phrase; all but its first {CUE_WORDS} are asked for."
    )
    phrases: Count = Field(default=2, description="Phrases of a sample at each distance.")
    distances: Counts | None = Field(
        default=None,
        description="Tokens from a phrase to its return; None takes the powers of two from "
        f"{SHORTEST_DISTANCE} to half the context length.",
    )


class ManyShotOptions(RulerOptions):
    """Options of many-shot classification."""

    title = "many-shot classification: sb_many_shot"

    examples: Examples = Field(description="Which labelled texts.")
    trec: PathText | None = Field(default=None, description="Local copy of CogComp/trec; None takes the hub's.")
    banking77: PathText | None = Field(default=None, description="The same of PolyAI/banking77.")
    clinc150: PathText | None = Field(default=None, description="The same of clinc/clinc_oos.")
    nlu: PathText | None = Field(default=None, description="The same of xingkunliuxtracta/nlu_evaluation_data.")
    examples_file: PathText | None = Field(
        default=None, description="Labelled texts of sb_many_shot_file, with the columns text and label."
    )


class AssociationOptions(PlacedOptions):
    """Options of needles that share no word with their question."""

    title = "needles without a shared word: sb_association"

    type_haystack: Literal["noise", "essay"] = Field(description="What the sentences about people lie in.")
    people: Annotated[int, whole(2)] = Field(description="People in the text, one of them asked for.")
    associations: PathText | None = Field(
        default=None,
        description='A .jsonl of {"shown", "asked"}, such as "the Louvre" and "Paris"; None takes the packaged list.',
    )


class TurnsOptions(PlacedOptions):
    """Options of the n-th of several same-looking turns."""

    title = "the n-th of some turns: sb_turns"

    same_turns: Annotated[int, whole(2)] = Field(description="Turns with the same request, one of them asked for.")


class LongBenchOptions(RulerOptions):
    """Options of LongBench v2."""

    title = "LongBench v2 by length: sb_longbench2"

    stratum: Literal["short", "medium", "long"] = Field(description="Which of its texts.")
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
        description="Context lengths in tokens, from 2 on, since the first position has no key before it; None takes "
        "the task's own, as far as text and model reach.",
    )
    num_samples: Counted = Field(default=8, description="Blocks of text at each length.")
    queries: Counted = Field(default=64, description="Queries looked at in a block.")
