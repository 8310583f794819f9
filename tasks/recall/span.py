"""`sb_span`: measures how far back every layer and head attends on real text, at each context length."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean

from sbeval.corpora import Layout, TokenizedCorpus, separator_ids, token_key, tokenize_corpus
from sbeval.errors import UserError
from sbeval.results.records import TaskRecord, metric_key
from sbeval.scoring.requests import ATTENTION_SPAN
from sbeval.tasks.base import BaseTask
from sbeval.tasks.perplexity.inputs import load_corpus
from sbeval.tasks.recall.options import SpanOptions
from sbeval.tasks.tokens import load_counter

MEANS = {"span50": 2, "span90": 3, "remaining_stick": 5, "first_token_weight": 6, "attention_entropy": 7}
"""Metrics that are means over all heads; each is mapped to its index in the list of values of a head."""
Rows = list[list[float | None]]


class SpanTask(BaseTask):
    """Effective attention spans of every layer and head on real text.

    The YAML's `dataset_name` names the corpus. A document is one block of the longest context length. A shorter context
    is the end of the block, so the same query tokens are measured at every length: the last ones of the context.

    Metrics at each length are `attention_span`, one row for each layer and head, and the means over all heads in
    `MEANS`. A row is averaged over blocks: [layer, head, distances within which 50 %, 90 % and 99 % of the attention
    weight lie, remaining stick, weight on the first token, entropy in nats]. The remaining stick is the part of a
    query's weight that stick-breaking attention gives to no token.
    """

    options_class = SpanOptions

    def download(self, dataset_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Tokenises the corpus, and chooses evenly spaced blocks of it as documents."""
        name = str(self.config.task)
        metadata = self.config.metadata
        options = SpanOptions.of_task(name, metadata)
        self.lengths, dropped, _ = options.lengths_of(name, metadata.get("pretrained"))
        self.queries = options.queries
        tokenizer = load_counter(metadata, name).tokenizer
        separator = separator_ids(tokenizer, None)
        source = load_corpus(self.config.dataset_name, options, tokenizer)
        self.corpus: TokenizedCorpus = tokenize_corpus(source, tokenizer, Layout(separator, False))
        longest = self.lengths[-1]
        total = self.corpus.total_tokens
        if total < longest:
            remedy = "set shorter context_lengths or give a longer text with data_path"
            raise UserError(f"{name} needs a text of at least {longest} tokens and found {total}; {remedy}.")
        blocks = min(options.num_samples, total // longest)
        record = TaskRecord(
            family="span",
            corpus=source.name,
            corpus_sha256=self.corpus.corpus_sha256,
            corpus_detail=source.recorded_detail(),
            protocol="span",
            separator=tokenizer.decode(list(separator)),
            lengths=list(self.lengths),
            dropped_lengths=list(dropped),
            tokenizer_sha256=self.corpus.tokenizer_sha256,
        )
        self.keep_record(record, tokenizer)
        self.keep_documents({"stop": longest + i * (total - longest) // max(1, blocks - 1)} for i in range(blocks))

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Returns one request for each length; the contexts of all lengths end at the same token."""
        keys = [token_key(self.corpus, doc["stop"] - length, doc["stop"]) for length in self.lengths]
        requests = [(key, length, self.queries) for key, length in zip(keys, self.lengths, strict=True)]
        metadata = kwargs["metadata"]
        return [
            Instance(ATTENTION_SPAN, doc, request, place, metadata=metadata) for place, request in enumerate(requests)
        ]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Rows]) -> dict[str, Any]:
        """Returns the rows of all heads at every length, and the means over heads."""
        values: dict[str, Any] = {}
        for length, rows in zip(self.lengths, results, strict=True):
            values[metric_key("attention_span", length)] = rows
            for metric, place in MEANS.items():
                known = [value for row in rows if (value := row[place]) is not None]
                values[metric_key(metric, length)] = sum(known) / len(known) if known else math.nan
        return values

    def aggregation(self) -> dict[str, Callable[[Sequence[Any]], Any]]:
        """Returns the functions that average every metric over blocks, by metric key."""
        functions: dict[str, Callable[[Sequence[Any]], Any]] = {
            "attention_span": average_rows,
            **dict.fromkeys(MEANS, mean),
        }
        return {
            metric_key(metric, length): function for length in self.lengths for metric, function in functions.items()
        }


def average_rows(blocks: Sequence[Rows]) -> "SpanRows":
    """Averages each head's row of values over all blocks; missing values (None) are left out."""
    averaged = []
    for same in zip(*blocks, strict=True):
        columns = zip(*(row[2:] for row in same), strict=True)
        known = [[value for value in column if value is not None] for column in columns]
        averaged.append([*same[0][:2], *(sum(column) / len(column) if column else None for column in known)])
    return SpanRows(averaged)


class SpanRows(tuple[list[float | None], ...]):
    """One row of values for each head; its text is only their number, such as "144 heads", to fit lm-eval's table."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{len(self)} heads"
