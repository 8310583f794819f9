"""`riffled`: can a model use the earlier pieces of a document when pieces of other documents stand in between?

A context of L tokens holds pieces of k documents, L / k tokens of each document, and ends with the only scored piece.
The model reads it in three arrangements, of which the first two consist of the same tokens:

- riffled: the documents alternate piece by piece, as cards of a riffle shuffle
- blocks: all pieces of a document follow each other, and the scored piece's document is the last one
- replaced: as riffled, but pieces of another document replace the earlier pieces of the scored piece's document
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
    """Scores the last piece of a document after its earlier pieces, in one block and riffled with other documents."""

    protocol = "riffled"
    beside = ("blocks", "replaced")
    context = "document"

    def targets_per_window(self) -> int:
        """Returns the number of tokens in a piece."""
        return self.options.piece_tokens

    def settle(self) -> SettledLengths:
        """Chooses lengths at which all k documents contribute the same number of whole pieces, at least two."""
        documents, piece = self.options.riffled_documents, self.options.piece_tokens
        room = (np.sort(self.corpus.document_tokens) - piece) * documents
        enough = int(room[-documents - 1]) if len(room) > documents else 0
        because = f"a longer one needs {documents + 1} longer documents, and the text has fewer"
        text = Limit(max(0, enough), because, "give more long documents or set shorter context_lengths")
        lengths = self.settle_within([text, *self.model_limits()], room)
        if odd := [n for n in lengths.scored if n % (documents * piece) or n == documents * piece]:
            raise UserError(
                f"{self.config.task}: expected context_lengths that hold at least two pieces of {piece} tokens from "
                f"each of {documents} documents (multiples of {documents * piece}), found {odd}: change "
                "context_lengths, piece_tokens or riffled_documents."
            )
        return lengths

    def blocks(self) -> list[dict[str, Any]]:
        """Returns one block for each scored piece; it also says which ranges of other documents are in its context."""
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
        """Draws k other documents and a range of `stretch` tokens in each; returns where these ranges end."""
        rng = np.random.default_rng([self.options.seed, index])
        candidates = long[long != self.corpus.document_at(stop - 1)]
        documents = rng.permutation(candidates)[: self.options.riffled_documents]
        firsts = self.corpus.starts[documents] + stretch
        stops = self.corpus.stops[documents]
        return rng.integers(firsts, stops, endpoint=True).tolist()  # type: ignore[no-any-return]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the window that consists of the scored piece and its document's earlier pieces in the context."""
        own_tokens = context_length // self.options.riffled_documents
        stop = block["stop"]
        return [Window(stop - own_tokens, stop, self.options.piece_tokens)]

    def build_all_requests(self, **kwargs: Any) -> None:
        """Builds the requests, and corrects two fields of the task's record.

        `own_document_share` becomes None, since every context holds several documents. The hash of the targets also
        covers the number of documents.
        """
        super().build_all_requests(**kwargs)
        # NLLs of the same targets are not comparable if their contexts hold another number of documents
        among = f"{self.task_record.targets_sha256} among {self.options.riffled_documents}"
        self.task_record = dataclasses.replace(
            self.task_record,
            own_document_share=None,
            targets_sha256=hashlib.sha256(among.encode()).hexdigest(),
        )

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Returns three requests for each length, one for each arrangement."""
        sequences = [self.sequence(doc, length, condition) for condition, length in self._conditions()]
        return self.target_requests([(doc["block"], dict(doc))], sequences)

    def _conditions(self) -> Iterator[tuple[str, int]]:
        return ((condition, length) for condition in ("", *self.beside) for length in self.lengths.scored)

    def sequence(self, block: Mapping[str, Any], context_length: int, condition: str) -> TargetSequence:
        """Returns the context and the scored piece in the arrangement `condition`; "" means riffled."""
        piece, documents = self.options.piece_tokens, self.options.riffled_documents
        stretch = context_length // documents
        ends: Sequence[int] = [*block["others"], block["stop"]]
        # [k + 1 documents, pieces, tokens]; with "replaced", the first document's pieces replace the last one's
        tokens = np.stack([self.corpus.tokens(end - stretch, end) for end in ends]).reshape(len(ends), -1, piece)
        if condition == "replaced":
            tokens[-1, :-1] = tokens[0, :-1]
        arranged = tokens[1:] if condition == "blocks" else tokens[1:].swapaxes(0, 1)
        ids = np.concatenate([[self.lead_in.token], arranged.ravel()]).astype(np.int64)
        return TargetSequence(ids[:-1], np.arange(context_length - piece, context_length), ids[-piece:])

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> SampleMetrics:
        """Returns the NLL sums over the scored piece, for each arrangement and length."""
        logged = {}
        for (condition, length), result in zip(self._conditions(), results, strict=True):
            (window,) = self.windows(doc, length)
            nll = checked_nll(self.config.task, window, result, null=self.records_null)
            logged[metric_key(f"nll_{condition}".rstrip("_"), length)] = self.rows(doc, length, {window: nll})
        return SampleMetrics(logged, self.aggregation())
