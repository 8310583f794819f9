"""`rolling`: every document separately, in the windows of lm-eval's rolling log-likelihood."""

from collections.abc import Mapping
from typing import Any

from sbeval.corpora import prefix_token_id
from sbeval.corpora.windows import Window, rolling_windows
from sbeval.results.records import ClusterSums
from sbeval.tasks.lengths import Limit, SettledLengths, settle_lengths
from sbeval.tasks.perplexity.inputs import LeadIn
from sbeval.tasks.perplexity.metrics import WindowNll
from sbeval.tasks.perplexity.task import PerplexityTask


class Rolling(PerplexityTask):
    """Every document separately, in lm-eval's rolling windows: the numbers of lm-eval's own task at max_length=L."""

    protocol = "rolling"
    special_tokens = True
    context = "document"

    def separator(self, tokenizer: Any) -> tuple[int, ...]:
        """Returns EOS, so that the cached tokens of a corpus serve all protocols; here no window spans documents."""
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def settle_lead_in(self, tokenizer: Any, separator: tuple[int, ...]) -> LeadIn:
        """Returns lm-eval's rule: BOS (or else EOS) precedes every document, also if the tokenizer adds neither."""
        return LeadIn(policy="hf", token=prefix_token_id(tokenizer))

    def settle(self) -> SettledLengths:
        """Chooses the requested lengths, or the default lengths up to the first that no document exceeds."""
        longest = int(self.corpus.document_tokens.max(initial=0))
        defaults = self.options.default_lengths
        enough = next((length for length in defaults if length >= longest), defaults[-1])
        useful = Limit(enough, f"no document is longer than {longest} tokens", "give longer documents")
        hard = self.model_limits()
        return settle_lengths(self.config.task, self.options.context_lengths, defaults, hard=hard, by_default=[useful])

    def blocks(self) -> list[dict[str, Any]]:
        """Returns one block for each document that is not empty."""
        bounds = zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), strict=True)
        listed = [{"document": index, "start": start, "stop": stop} for index, (start, stop) in enumerate(bounds)]
        return [block for block in listed if block["stop"] > block["start"]]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts a document into lm-eval's rolling windows."""
        return rolling_windows(block["start"], block["stop"], context_length)

    def rows(self, doc: Mapping[str, Any], context_length: int, nll: WindowNll) -> list[ClusterSums]:
        """Returns a document's NLL sum; words and bytes are counted in the page before preprocessing, as in lm-eval."""
        windows = self.windows(doc, context_length)
        corpus = self.corpus
        index = doc["document"]
        nats = float(sum(nll[window].sum() for window in windows))
        tokens = sum(window.scored for window in windows)
        size = (float(corpus.original_words[index]), float(corpus.original_bytes[index]))
        return [ClusterSums(corpus.names[index], nats, tokens, *size)]
