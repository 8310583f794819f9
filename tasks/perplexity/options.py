"""What a user chooses with `--metadata` for the perplexity tasks."""

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
    """Which text a task reads; None leaves the corpus's own."""

    title = "perplexity and attention spans: which text"

    data_path: LocalPath | None = Field(default=None, description="Local file or folder to read instead.")
    dataset: Text | None = Field(default=None, description="Hub dataset to read instead.")
    dataset_config: Text | None = Field(default=None, description="Configuration of the hub dataset.")
    dataset_split: Text | None = Field(default=None, description="Split of the hub dataset.")
    text_field: Text | None = Field(default=None, description="Field or column that holds the text.")
    split: Split | None = Field(
        default=None,
        description='Cuts documents into smaller ones: "paragraph", "512 tokens", or a regular expression that matches '
        "between them.",
    )

    def check_text(self, corpus: str) -> None:
        """Refuses options that name no text, or one that the task's own corpus cannot be.

        Raises:
            UserError: saying what to name.
        """
        if corpus == "wikitext" and (self.dataset is not None or self.text_field is not None):
            raise UserError(
                "Expected wikitext to come from its own hub dataset or from data_path, found dataset or text_field in "
                "--metadata: use sb_text with the same values for another dataset."
            )
        if corpus == "wikitext" and self.split is not None:
            expected = "Expected no split for wikitext, whose documents are its pages"
            raise UserError(f"{expected}, found one in --metadata: use sb_text with data_path or dataset.")
        if self.data_path is None and self.dataset is None and corpus not in (*HUB_DATASETS, _STDLIB):
            remedy = 'name one with --metadata \'{"data_path": "..."}\' or \'{"dataset": "owner/name"}\''
            raise UserError(f"Expected a text to read, found none: {remedy}.")


class PerplexityOptions(CorpusOptions):
    """Options of the perplexity tasks."""

    title = "perplexity: sb_wikitext, sb_stdlib, sb_pile, sb_pg19, sb_text"
    default_lengths = doublings(512, 65536)

    bos: Literal["text", "window"] | None = Field(
        default=None,
        description='What is fed before a window: the token before it in the text ("text"), or BOS ("window"); None is '
        "the tokenizer's default.",
    )
    separator: Text | None = Field(default=None, description="Text between joined documents; None is the EOS token.")
    targets_per_window: Count | None = Field(
        default=None, description="Scored targets of a fixed-target window; None is the protocol's default."
    )
    continues: Continued | None = Field(
        default=None,
        description="Results file of a finished fixed_target run, whose targets are scored at these context_lengths; "
        'None looks for one in --output_path; "none" does not.',
    )
    blocks_per_document: Count = Field(default=4, description="Most target blocks that one document gives.")
    riffled_documents: Annotated[int, whole(2)] = Field(
        default=4, description="Documents that share a context of the riffled protocol."
    )
    piece_tokens: Count = Field(
        default=64, description="Tokens of a piece of the riffled protocol; the last piece is scored."
    )
    stride: Count | None = Field(default=None, description="New targets of a sliding window; None is half its length.")
    longppl_evaluator: Text | None = Field(
        default=None,
        description="Checkpoint or hub id of the model that chooses LongPPL's key tokens; None is no LongPPL.",
    )
    context: Literal["document", "stream"] | None = Field(
        default=None, description="Where a window's left context may come from; None is the protocol's default."
    )
    seed: WholeNumber = Field(default=PERPLEXITY_SEED, description="Seed of sampling and of the bootstrap.")

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task.

        Raises:
            UserError: as for every task, and for a protocol, which is part of a task's name.
        """
        if "protocol" in metadata:
            expected = f"{task}: expected the protocol in the task's name"
            remedy = "name the task sb_<corpus>_<protocol>, such as sb_text_stream (`sbeval ls` lists them)"
            raise UserError(f"{expected}, found protocol {metadata['protocol']!r} in --metadata: {remedy}.")
        return super().of_task(task, metadata, definition)
