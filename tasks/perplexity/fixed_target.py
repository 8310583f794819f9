"""`fixed_target`: the same targets at every length, so that a difference is the context's alone.

Targets are chosen to have room for the longest length before them. A later run at other lengths scores the same ones if
it continues the first: it takes their room and number from its results file, and refuses to score others.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbeval.corpora.windows import Window, document_target_blocks, stream_target_blocks
from sbeval.errors import UserError
from sbeval.foreign_files import MOST_RESULTS_BYTES, fits, read_json_object
from sbeval.results.records import ClusterSums, metric_key
from sbeval.tasks.lengths import SettledLengths
from sbeval.tasks.perplexity.longppl import LEAST_GAIN_NATS, LEAST_LOGPROB_NATS, key_tokens
from sbeval.tasks.perplexity.metrics import WindowNll
from sbeval.tasks.perplexity.options import MOST_TARGETS
from sbeval.tasks.perplexity.task import PerplexityTask


class _Finished(NamedTuple):
    """What a results file says of a task's targets, in the words of `TaskRecord`."""

    targets_per_window: int
    room_tokens: int
    targets_sha256: str
    lengths: list[int]


class FixedTarget(PerplexityTask):
    """One window a block and length; all end with the block's targets."""

    protocol = "fixed_target"
    default_context = "document"
    _finished: _Finished | None = None

    def targets_per_window(self) -> int:
        """Returns T: that of the run continued, as asked for, or at most 256 and at most half the shortest length."""
        shortest = (self.options.context_lengths or self.options.default_lengths)[0]
        targets = self.options.targets_per_window or max(1, min(MOST_TARGETS, shortest // 2))
        if self._finished is not None:
            targets = self._finished.targets_per_window
        if targets > shortest:
            raise UserError(
                f"{self.config.task}: expected targets_per_window of at most the shortest context length, {shortest}, "
                f"found {targets}: ask for fewer targets or longer context_lengths."
            )
        return targets

    def settle(self) -> SettledLengths:
        """Takes lengths that the text can fill to the left of the targets."""
        if isinstance(self.options.continues, Path):
            self._finished = _read_finished(self.options.continues, self.config.task)
        return self.settle_full_windows(targets=self.targets_per_window())

    def room_tokens(self) -> int:
        """Returns the left context that every target has at least: the longest length, or that of the run continued."""
        return self.lengths.scored[-1] if self._finished is None else self._finished.room_tokens

    def blocks(self) -> list[dict[str, Any]]:
        """One block is one run of targets; documents take turns."""
        longest = self.room_tokens()
        targets = self.targets_per_window()
        if self.context == "stream":
            bounds = list(stream_target_blocks(self.corpus.total_tokens, longest=longest, targets=targets))
        else:
            bounds = document_target_blocks(
                self.corpus.starts[:-1],
                self.corpus.stops,
                longest=longest,
                targets=targets,
                blocks_per_document=self.options.blocks_per_document,
                seed=self.options.seed,
            )
        return [
            {"block": index, "start": start, "stop": stop, **self._bytes(start, stop)}
            for index, (start, stop) in enumerate(bounds)
        ]

    def _bytes(self, start: int, stop: int) -> dict[str, int | None]:
        """Returns where in their document's bytes some targets begin and end, by which other tokenizers' are known."""
        document = self.corpus.document_at(start)
        if stop > self.corpus.stops[document]:  # of several documents
            return {"start_byte": None, "stop_byte": None}
        first, last = (self.corpus.bytes_before(document, position) for position in (start, stop))
        return {"start_byte": first, "stop_byte": last}

    def check_targets(self, chosen: Sequence[Mapping[str, Any]], targets_sha256: str) -> None:
        """Refuses to continue a run with other targets than its own, or at a length that they have no room for."""
        if self._finished is None:
            return
        expected = f"{self.config.task}: expected the targets of {self.options.continues}"
        longest = self.lengths.scored[-1]
        if targets_sha256 != self._finished.targets_sha256:
            remedy = (
                "give the same text, tokenizer, --limit and options as that run, or add "
                '"continues": "none" to --metadata to score other targets'
            )
            raise UserError(f"{expected}, found others: {remedy}.")
        places = [self.corpus.document_at(block["start"]) for block in chosen]
        starts = [0 if self.context == "stream" else self.corpus.starts[place] for place in places]
        enough = sum(block["stop"] - longest > start for block, start in zip(chosen, starts, strict=True))
        if enough < len(chosen):
            lengths = json.dumps(sorted({*self._finished.lengths, *self.lengths.scored}))
            raise UserError(
                f"{expected} to have a context of {longest} tokens before them, found {enough} of {len(chosen)} blocks "
                f"that do, since they were chosen to have {self._finished.room_tokens}: run all lengths at once, with "
                f"--metadata '{{\"context_lengths\": {lengths}}}'."
            )

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the one window that ends with the block's targets."""
        start, stop = block["start"], block["stop"]
        return [Window(stop - context_length, stop, stop - start)]

    def build_all_requests(self, **kwargs: Any) -> None:
        """Builds the requests; where a LongPPL evaluator was named, lets it choose the key tokens of this process."""
        super().build_all_requests(**kwargs)
        if (evaluator := self.options.longppl_evaluator) is None:
            return
        scored = self.lengths.scored
        if len(scored) < 2:
            expected = f"{self.config.task}: expected two context_lengths or more for LongPPL"
            raise UserError(f"{expected}, found {list(scored)}: ask for a shorter one too.")
        blocks = [instance.doc for instance in self.instances if instance.idx == 0]
        windows = [[self.windows(block, length)[0] for length in (scored[0], scored[-1])] for block in blocks]
        pairs = [(self.request(short), self.request(long)) for short, long in windows]
        dtype = str(self.config.metadata.get("dtype") or "auto").removeprefix("torch.")
        written_in = {"tokenizer": self.tokenizer, "tokenizer_hash": self.corpus.tokenizer_sha256}
        masks = key_tokens(evaluator, pairs, dtype=dtype, **written_in)
        self._key_tokens = {block["start"]: mask for block, mask in zip(blocks, masks, strict=True)}
        self.metrics.longppl = True
        longppl = {
            "evaluator": evaluator,
            "dtype": dtype,
            "short": scored[0],
            "long": scored[-1],
            "least_gain_nats": LEAST_GAIN_NATS,
            "least_logprob_nats": LEAST_LOGPROB_NATS,
        }
        self.task_record = dataclasses.replace(self.task_record, longppl=longppl)

    def cuts(self, block: Mapping[str, Any], window: Window) -> list[int]:
        """Adds where key tokens begin and end."""
        changes = np.flatnonzero(np.diff(self._key_tokens[block["start"]])) + 1 if self.metrics.longppl else ()
        return [*super().cuts(block, window), *map(int, changes)]

    def logged(self, doc: Mapping[str, Any], nll: WindowNll) -> dict[str, Any]:
        """Adds the rows of the block's key tokens."""
        sample = super().logged(doc, nll)
        if self.metrics.longppl:
            mask = self._key_tokens[doc["start"]]
            cluster = self.corpus.names[self.corpus.document_at(doc["start"])]
            for length in self.lengths.scored:
                chosen = nll[self.windows(doc, length)[0]][mask]
                row = ClusterSums(cluster, float(chosen.sum()), len(chosen), float("nan"), float("nan"))
                sample[metric_key("longppl", length)] = [row]
        return sample


def _read_finished(path: Path, task: str) -> _Finished:
    record: Any = read_json_object(path, "a results file", remedy="name one to continue", most=MOST_RESULTS_BYTES)
    for name in ("configs", task, "metadata", "sbeval"):
        record = record.get(name) if isinstance(record, dict) else None
    values: Any = [record.get(name) if isinstance(record, dict) else None for name in _Finished._fields]
    *numbers, digest, lengths = values
    if not fits(numbers, list[int]) or min(numbers) < 1 or not fits(digest, str) or not fits(lengths, list[int]):
        remedy = "name the results file of that task, written by this version"
        raise UserError(f"Expected {path} to record which targets {task} scored, found that it does not: {remedy}.")
    return _Finished(*values)
