"""`pairs`: a user's own targets behind the last N tokens of their own contexts, and behind no context at all.

Pairs are lines of a .jsonl file. Context and target are tokenised together, and the tokens that the context's end alone
does not have are the target's. N counts context; beside it stand the token that begins documents and the target.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import Corpus, local_pairs, make_document, prefix_token_id
from sbeval.corpora.tokenizers import shared_start
from sbeval.corpora.windows import Window
from sbeval.errors import UserError
from sbeval.results.records import metric_key
from sbeval.tasks.lengths import Limit, SettledLengths
from sbeval.tasks.perplexity.inputs import LeadIn, local_name
from sbeval.tasks.perplexity.metrics import WindowNll, document_rows
from sbeval.tasks.perplexity.task import PerplexityTask
from sbeval.tasks.tokens import TAIL_CHARACTERS, TokenCounter

log = logging.getLogger(__name__)


class Pairs(PerplexityTask):
    """Every target at every length, and alone; pairs with less context than the longest length are left out."""

    protocol = "pairs"
    beside = ("without",)
    context = "document"
    _targets: NDArray[np.int64]

    def source(self, tokenizer: Any) -> Corpus:
        """Returns one document a pair, and counts the tokens of each target."""
        path = self.options.data_path
        other = self.options.dataset or self.options.split or self.options.text_field
        if path is None or other is not None:
            expected = "Expected the .jsonl file of your pairs as data_path and no dataset, split or text_field"
            raise UserError(f'{expected}, found {other or "none"}: give --metadata \'{{"data_path": "FILE.jsonl"}}\'.')
        counter = TokenCounter(tokenizer)
        pairs = functools.partial(local_pairs, path, "context", "target")
        ends = [(context[-TAIL_CHARACTERS:], target) for _, context, target in pairs()]
        alone = counter.encode([end for end, _ in ends], special_tokens=False)
        together = counter.encode([end + target for end, target in ends], special_tokens=False)
        counts = [len(both) - shared_start([end, both]) for end, both in zip(alone, together, strict=True)]
        self._targets = np.array(counts, dtype=np.int64)
        return Corpus(
            name=local_name(path),
            documents=lambda: (make_document(name, context + target) for name, context, target in pairs()),
            detail=path.name,
        )

    def settle_lead_in(self, tokenizer: Any, separator: tuple[int, ...]) -> LeadIn:
        """Returns the token that begins documents, before every context and where there is none."""
        return LeadIn(policy="window", token=prefix_token_id(tokenizer))

    def settle(self) -> SettledLengths:
        """Takes contexts as long as a pair has, and as the model takes with the longest target behind."""
        room = self.corpus.document_tokens - self._targets
        longest = int(self._targets.max())
        because = f"the longest context has {room.max()} tokens"
        text = Limit(int(room.max()), because, "ask for shorter context_lengths or give longer contexts")
        model = [limit._replace(tokens=limit.tokens - longest) for limit in self.model_limits()]
        return self.settle_within([text, *model], room)

    def blocks(self) -> list[dict[str, Any]]:
        """One pair is one block."""
        bounds = zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), self._targets.tolist(), strict=True)
        longest = self.lengths.scored[-1]
        pairs = [
            {"block": index, "start": stop - targets, "stop": stop}
            for index, (start, stop, targets) in enumerate(bounds)
            if targets and stop - targets - longest >= start
        ]
        if short := len(self.corpus.names) - len(pairs):
            words = "%s: left out %d of %d pairs, whose contexts are shorter than the longest length, %d tokens"
            log.warning(words, self.config.task, short, len(self.corpus.names), longest)
        return pairs

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the target behind some of its context."""
        return [Window(block["start"] - context_length, block["stop"], block["stop"] - block["start"])]

    def distinct_windows(self, block: Mapping[str, Any]) -> list[Window]:
        """Adds the target alone."""
        return [*super().distinct_windows(block), *self.windows(block, 0)]

    def logged(self, doc: Mapping[str, Any], nll: WindowNll) -> dict[str, Any]:
        """Adds the rows of the target alone."""
        alone = document_rows(self.corpus, self.windows(doc, 0), nll)
        return super().logged(doc, nll) | {metric_key("nll_without", length): alone for length in self.lengths.scored}
