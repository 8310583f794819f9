"""The options of the perplexity tasks, which a user sets with `--metadata`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from sbeval.corpora.split import Split
from sbeval.errors import UserError
from sbeval.settings import Count, Expected, LocalPath, Text, WholeNumber, as_path, whole
from sbeval.tasks.metadata import PERPLEXITY_SEED, TaskOptions, doublings

MOST_TARGETS = 256
HUB_DATASETS = {
    "wikitext": "EleutherAI/wikitext_document_level",
    "pile": "NeelNanda/pile-10k",
    "pg19": "emozilla/pg19-test",
}
_STDLIB = "stdlib"
Continued = Annotated[
    Path | Literal["none"],
    Expected('a path or "none"', lambda value: value if value == "none" else as_path(value)),
]


class CorpusOptions(TaskOptions):
    """Options that choose the text of a task; with None the task uses the corpus and settings of its YAML."""

    title = "perplexity and attention spans: which text"

    data_path: LocalPath | None = Field(
        default=None, description="Local file or folder to read instead of the task's corpus."
    )
    dataset: Text | None = Field(default=None, description="Hub dataset to read instead of the task's corpus.")
    dataset_config: Text | None = Field(default=None, description="Configuration of the hub dataset.")
    dataset_split: Text | None = Field(default=None, description="Split of the hub dataset.")
    text_field: Text | None = Field(default=None, description="Field or column that holds the text.")
    split: Split | None = Field(
        default=None,
        description='Splits documents into smaller ones: "paragraph", "512 tokens", or a regular expression that '
        "matches the text between them.",
    )

    def check_text(self, corpus: str) -> None:
        """Checks that the options name a text and suit the task's corpus.

        Args:
            corpus: the corpus that the task's YAML names.

        Raises:
            UserError: the options name no text, or the corpus is wikitext and they set `dataset`, `text_field` or
                `split`.
        """
        if corpus == "wikitext" and (self.dataset is not None or self.text_field is not None):
            raise UserError(
                "wikitext tasks read their own hub dataset or data_path, but --metadata sets dataset or text_field: "
                "use the sb_text tasks with the same values for another dataset."
            )
        if corpus == "wikitext" and self.split is not None:
            raise UserError(
                "The documents of wikitext are its pages and cannot be split: remove split from --metadata, or use the "
                "sb_text tasks with data_path or dataset."
            )
        if self.data_path is None and self.dataset is None and corpus not in (*HUB_DATASETS, _STDLIB):
            remedy = 'name one with --metadata \'{"data_path": "..."}\' or \'{"dataset": "owner/name"}\''
            raise UserError(f"Expected a text to read, found none: {remedy}.")


class PerplexityOptions(CorpusOptions):
    """Options of the perplexity tasks."""

    title = "perplexity: sb_wikitext, sb_stdlib, sb_pile, sb_pg19, sb_text"
    default_lengths = doublings(512, 65536)

    bos: Literal["text", "window"] | None = Field(
        default=None,
        description='Token that is fed before a window: the preceding token of the text ("text"), or BOS ("window"); '
        "None follows the tokenizer.",
    )
    separator: Text | None = Field(default=None, description="Text between joined documents; None is the EOS token.")
    targets_per_window: Count | None = Field(
        default=None, description="Scored targets of a window of fixed_target; None takes the protocol's default."
    )
    continues: Continued | None = Field(
        default=None,
        description="Results file of a finished fixed_target run whose targets this run scores at its context_lengths; "
        'None searches --output_path for one, and "none" does not.',
    )
    blocks_per_document: Count = Field(default=4, description="Largest number of target blocks from one document.")
    riffled_documents: Annotated[int, whole(2)] = Field(
        default=4, description="Number of documents in each context of the riffled protocol."
    )
    piece_tokens: Count = Field(
        default=64, description="Tokens in a piece of the riffled protocol; the last piece is scored."
    )
    stride: Count | None = Field(
        default=None, description="New targets in each sliding window; None is half the window's length."
    )
    longppl_evaluator: Text | None = Field(
        default=None,
        description="Checkpoint or hub id of the model that selects LongPPL's key tokens; None computes no LongPPL.",
    )
    context: Literal["document", "stream"] | None = Field(
        default=None,
        description='Source of a window\'s left context: its own document ("document") or the joined text ("stream"); '
        "None takes the protocol's default.",
    )
    seed: WholeNumber = Field(default=PERPLEXITY_SEED, description="Seed of sampling and of the bootstrap.")

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task.

        Raises:
            UserError: as in `TaskOptions.of_task`, or `--metadata` sets a protocol: the task's name determines it.
        """
        if "protocol" in metadata:
            remedy = "run the task sb_<corpus>_<protocol>, such as sb_text_stream (`sbeval ls` lists the tasks)"
            raise UserError(
                f"{task}: the task's name decides its protocol, but --metadata sets protocol "
                f"{metadata['protocol']!r}: {remedy}."
            )
        return super().of_task(task, metadata, definition)
