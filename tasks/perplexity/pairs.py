"""`pairs`: the user's own targets, scored after the last N tokens of their own contexts and after no context.

The pairs of context and target are the lines of a .jsonl file. Context and target are tokenised together. The target's
tokens are those after the longest common prefix with the tokens of the context by itself. N counts only context tokens;
the model's input also holds a first token, such as BOS or EOS, with which every document begins, and the target.
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
    """Scores the user's own targets after contexts of every length, and without context.

    Pairs whose context is shorter than the longest length are left out.
    """

    protocol = "pairs"
    beside = ("without",)
    context = "document"
    _targets: NDArray[np.int64]

    def source(self, tokenizer: Any) -> Corpus:
        """Returns a corpus with one document for each pair, and counts the tokens of each target."""
        path = self.options.data_path
        unusable = self.options.dataset or self.options.split or self.options.text_field
        if path is None or unusable is not None:
            expected = "Expected the .jsonl file of your pairs as data_path and no dataset, split or text_field"
            raise UserError(
                f'{expected}, found {unusable or "none"}: set --metadata \'{{"data_path": "FILE.jsonl"}}\'.'
            )
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
        """Returns the rule that feeds the same first token in every window, also before a target without context."""
        return LeadIn(policy="window", token=prefix_token_id(tokenizer))

    def settle(self) -> SettledLengths:
        """Chooses lengths that some context has, and at which context and longest target fit the model's input."""
        room = self.corpus.document_tokens - self._targets
        longest = int(self._targets.max())
        because = f"the longest context has {room.max()} tokens"
        text = Limit(int(room.max()), because, "set shorter context_lengths or give longer contexts")
        model = [limit._replace(tokens=limit.tokens - longest) for limit in self.model_limits()]
        return self.settle_within([text, *model], room)

    def blocks(self) -> list[dict[str, Any]]:
        """Returns one block for each pair whose context is long enough."""
        bounds = zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), self._targets.tolist(), strict=True)
        longest = self.lengths.scored[-1]
        pairs = [
            {"block": index, "start": stop - targets, "stop": stop}
            for index, (start, stop, targets) in enumerate(bounds)
            if targets and stop - targets - longest >= start
        ]
        if short := len(self.corpus.names) - len(pairs):
            message = (
                "%s: left out %d of %d pairs because their contexts are shorter than the longest length, %d tokens"
            )
            log.warning(message, self.config.task, short, len(self.corpus.names), longest)
        return pairs

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the window of the target with the last `context_length` tokens of its context."""
        return [Window(block["start"] - context_length, block["stop"], block["stop"] - block["start"])]

    def distinct_windows(self, block: Mapping[str, Any]) -> list[Window]:
        """Returns the block's windows at all lengths, and the window of the target without context."""
        return [*super().distinct_windows(block), *self.windows(block, 0)]

    def logged(self, doc: Mapping[str, Any], nll: WindowNll) -> dict[str, Any]:
        """Returns the values that a sample logs; `nll_without@L` holds the sums over the target without context."""
        alone = document_rows(self.corpus, self.windows(doc, 0), nll)
        return super().logged(doc, nll) | {metric_key("nll_without", length): alone for length in self.lengths.scored}
