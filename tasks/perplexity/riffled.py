"""`riffled`: does a model find its own document again where others stand in between?

A context of L tokens holds pieces of k documents, L / k tokens of each, and ends with the piece that is scored. It is
read three times, with the same tokens where it is riffled and where it is in blocks:

- riffled: one piece of each document in turn
- blocks: one document behind the other, the scored one last
- replaced: riffled, with another document in place of the scored one's earlier pieces
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from sbeval.corpora.windows import Window, document_target_blocks
from sbeval.errors import UserError
from sbeval.results.records import metric_key
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.lengths import Limit, SettledLengths
from sbeval.tasks.perplexity.metrics import SampleMetrics, checked_nll
from sbeval.tasks.perplexity.task import PerplexityTask


class Riffled(PerplexityTask):
    """The last piece of a document, behind its text in one block and behind it riffled with that of others."""

    protocol = "riffled"
    beside = ("blocks", "replaced")
    context = "document"

    def targets_per_window(self) -> int:
        """Returns the tokens of a piece."""
        return self.options.piece_tokens

    def settle(self) -> SettledLengths:
        """Takes lengths that hold equally many whole pieces of every document."""
        documents, piece = self.options.riffled_documents, self.options.piece_tokens
        room = (np.sort(self.corpus.document_tokens) - piece) * documents
        enough = int(room[-documents - 1]) if len(room) > documents else 0
        because = f"{documents + 1} documents are riffled and replaced, and fewer are longer"
        text = Limit(max(0, enough), because, "give more long documents or ask for shorter context_lengths")
        lengths = self.settle_within([text, *self.model_limits()], room)
        if odd := [n for n in lengths.scored if n % (documents * piece) or n == documents * piece]:
            raise UserError(
                f"{self.config.task}: expected context_lengths of two pieces or more of {piece} tokens from each of "
                f"{documents} documents, multiples of {documents * piece}, found {odd}: change context_lengths, "
                "piece_tokens or riffled_documents."
            )
        return lengths

    def blocks(self) -> list[dict[str, Any]]:
        """One block is one scored piece, and the documents that are riffled with its own."""
        stretch = self.lengths.scored[-1] // self.options.riffled_documents
        bounds = document_target_blocks(
            self.corpus.starts[:-1],
            self.corpus.stops,
            longest=stretch,
            targets=self.options.piece_tokens,
            blocks_per_document=self.options.blocks_per_document,
            seed=self.options.seed,
        )
        long = np.flatnonzero(self.corpus.document_tokens >= stretch)
        return [
            {"block": index, "start": start, "stop": stop, "others": self._others(index, stop, long, stretch)}
            for index, (start, stop) in enumerate(bounds)
        ]

    def _others(self, index: int, stop: int, long: NDArray[np.int64], stretch: int) -> list[int]:
        """Draws where k stretches of other documents end."""
        rng = np.random.default_rng([self.options.seed, index])
        others = rng.permutation(long[long != self.corpus.document_at(stop - 1)])[: self.options.riffled_documents]
        firsts = self.corpus.starts[others] + stretch
        stops = self.corpus.stops[others]
        return rng.integers(firsts, stops, endpoint=True).tolist()  # type: ignore[no-any-return]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the scored piece with what is shown of its own document."""
        shown = context_length // self.options.riffled_documents
        stop = block["stop"]
        return [Window(stop - shown, stop, self.options.piece_tokens)]

    def build_all_requests(self, **kwargs: Any) -> None:
        """Builds the requests; no target's context is its own document's alone."""
        super().build_all_requests(**kwargs)
        # the same targets among more documents are another question
        among = f"{self.task_record.targets_sha256} among {self.options.riffled_documents}"
        self.task_record = dataclasses.replace(
            self.task_record,
            own_document_share=None,
            targets_sha256=hashlib.sha256(among.encode()).hexdigest(),
        )

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Returns three requests at each length."""
        sequences = [self.sequence(doc, length, condition) for condition, length in self._asked()]
        return self.target_requests([(doc["block"], dict(doc))], sequences)

    def _asked(self) -> Iterator[tuple[str, int]]:
        return ((condition, length) for condition in ("", *self.beside) for length in self.lengths.scored)

    def sequence(self, block: Mapping[str, Any], context_length: int, condition: str) -> TargetSequence:
        """Returns a context of a length; the empty condition is riffled."""
        piece, documents = self.options.piece_tokens, self.options.riffled_documents
        stretch = context_length // documents
        ends: Sequence[int] = [*block["others"], block["stop"]]
        # [k + 1, pieces, tokens]; the first document stands in for the last where that is replaced
        tokens = np.stack([self.corpus.tokens(end - stretch, end) for end in ends]).reshape(len(ends), -1, piece)
        if condition == "replaced":
            tokens[-1, :-1] = tokens[0, :-1]
        shown = tokens[1:] if condition == "blocks" else tokens[1:].swapaxes(0, 1)
        ids = np.concatenate([[self.lead_in.token], shown.ravel()]).astype(np.int64)
        return TargetSequence(ids[:-1], np.arange(context_length - piece, context_length), ids[-piece:])

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> SampleMetrics:
        """Returns the rows of the scored piece by condition and length."""
        logged = {}
        for (condition, length), result in zip(self._asked(), results, strict=True):
            (window,) = self.windows(doc, length)
            nll = checked_nll(self.config.task, window, result, null=self.records_null)
            logged[metric_key(f"nll_{condition}".rstrip("_"), length)] = self.rows(doc, length, {window: nll})
        return SampleMetrics(logged, self.aggregation())
