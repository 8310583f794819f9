"""`rolling`: each document alone, cut as lm-eval's rolling log-likelihood cuts it."""

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
    """Equal to lm-eval's own task at max_length=L, its BOS and its words and bytes included."""

    protocol = "rolling"
    special_tokens = True
    context = "document"

    def separator(self, tokenizer: Any) -> tuple[int, ...]:
        """Nothing is joined; EOS lies between documents only so that the other protocols' tokens can be shared."""
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def settle_lead_in(self, tokenizer: Any, separator: tuple[int, ...]) -> LeadIn:
        """Returns lm-eval's own rule: BOS, else EOS, before every document, whatever the tokenizer adds."""
        return LeadIn(policy="hf", token=prefix_token_id(tokenizer))

    def settle(self) -> SettledLengths:
        """Takes any length asked for; by default up to the first that takes the longest document whole."""
        longest = int(self.corpus.document_tokens.max(initial=0))
        defaults = self.options.default_lengths
        enough = next((length for length in defaults if length >= longest), defaults[-1])
        whole = Limit(enough, f"no document is longer than {longest} tokens", "give longer documents")
        hard = self.model_limits()
        asked = self.options.context_lengths
        return settle_lengths(self.config.task, asked, defaults, hard=hard, by_default=[whole])

    def blocks(self) -> list[dict[str, Any]]:
        """One document is one block."""
        bounds = zip(self.corpus.starts[:-1].tolist(), self.corpus.stops.tolist(), strict=True)
        listed = [{"document": index, "start": start, "stop": stop} for index, (start, stop) in enumerate(bounds)]
        return [block for block in listed if block["stop"] > block["start"]]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Cuts the document as lm-eval does."""
        return rolling_windows(block["start"], block["stop"], context_length)

    def rows(self, doc: Mapping[str, Any], context_length: int, nll: WindowNll) -> list[ClusterSums]:
        """Returns the document's one row; its words and bytes are the whole page's."""
        windows = self.windows(doc, context_length)
        corpus = self.corpus
        index = doc["document"]
        nats = float(sum(nll[window].sum() for window in windows))
        tokens = sum(window.scored for window in windows)
        size = (float(corpus.original_words[index]), float(corpus.original_bytes[index]))
        return [ClusterSums(corpus.names[index], nats, tokens, *size)]
