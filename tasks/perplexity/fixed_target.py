"""`fixed_target`: the same targets at every context length, so that only the context can explain a difference.

Targets are scored in blocks of consecutive tokens; lm-eval counts each block as one document.
Targets are chosen so that the longest context length fits before them. A later run at other lengths scores the same
targets if it continues the first run: it reads from that run's results file how many targets a window has and how many
tokens precede each target, and fails if the chosen targets would still differ.
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
    """Fields of a finished run's `TaskRecord` that describe its targets."""

    targets_per_window: int
    room_tokens: int
    targets_sha256: str
    lengths: list[int]


class FixedTarget(PerplexityTask):
    """One window for each block and length; every window ends with the block's targets."""

    protocol = "fixed_target"
    default_context = "document"
    _finished: _Finished | None = None

    def targets_per_window(self) -> int:
        """Returns the number of scored targets in every window.

        A continued run determines it, otherwise the option `targets_per_window`. The default is half the shortest
        context length, but at most `MOST_TARGETS`.

        Raises:
            UserError: the number is larger than the shortest context length.
        """
        shortest = (self.options.context_lengths or self.options.default_lengths)[0]
        targets = self.options.targets_per_window or max(1, min(MOST_TARGETS, shortest // 2))
        if self._finished is not None:
            targets = self._finished.targets_per_window
        if targets > shortest:
            raise UserError(
                f"{self.config.task}: expected targets_per_window of at most the shortest context length, {shortest}, "
                f"found {targets}: set fewer targets_per_window or longer context_lengths."
            )
        return targets

    def settle(self) -> SettledLengths:
        """Chooses lengths for which the text holds enough tokens before the targets."""
        if isinstance(self.options.continues, Path):
            self._finished = _read_finished(self.options.continues, self.config.task)
        return self.settle_full_windows(targets=self.targets_per_window())

    def room_tokens(self) -> int:
        """Returns how many tokens precede every target at least: the longest length of this or the continued run."""
        return self.lengths.scored[-1] if self._finished is None else self._finished.room_tokens

    def blocks(self) -> list[dict[str, Any]]:
        """Returns one block for each range of consecutive targets.

        With `context` "document", the first blocks of all documents come before all second blocks.
        """
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
        """Returns the byte range of a block's targets in their document; both ends are None if unknown.

        Byte ranges allow a comparison with the targets of another tokenizer.
        """
        document = self.corpus.document_at(start)
        if stop > self.corpus.stops[document]:
            return {"start_byte": None, "stop_byte": None}
        first, last = (self.corpus.bytes_before(document, position) for position in (start, stop))
        return {"start_byte": first, "stop_byte": last}

    def check_targets(self, chosen: Sequence[Mapping[str, Any]], targets_sha256: str) -> None:
        """Checks that the targets are those of the continued run, and that enough tokens precede them for every length.

        Raises:
            UserError: the targets differ, or fewer tokens than the longest length precede one of them.
        """
        if self._finished is None:
            return
        expected = f"{self.config.task}: expected the targets of {self.options.continues}"
        longest = self.lengths.scored[-1]
        if targets_sha256 != self._finished.targets_sha256:
            remedy = (
                "give the same text, tokenizer, --limit and options as that run, or add "
                '"continues": "none" to --metadata to score other targets'
            )
            raise UserError(f"{expected}, found different ones: {remedy}.")
        documents = [self.corpus.document_at(block["start"]) for block in chosen]
        starts = [0 if self.context == "stream" else self.corpus.starts[document] for document in documents]
        enough = sum(block["stop"] - longest > start for block, start in zip(chosen, starts, strict=True))
        if enough < len(chosen):
            lengths = json.dumps(sorted({*self._finished.lengths, *self.lengths.scored}))
            raise UserError(
                f"{expected} to have a context of {longest} tokens before them, found only {enough} of {len(chosen)} "
                f"blocks that do, because they were chosen to have {self._finished.room_tokens}: run all lengths at "
                f"once, with --metadata '{{\"context_lengths\": {lengths}}}'."
            )

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the only window of a block at this length, which ends with the block's targets."""
        start, stop = block["start"], block["stop"]
        return [Window(stop - context_length, stop, stop - start)]

    def build_all_requests(self, **kwargs: Any) -> None:
        """Builds the requests of this rank.

        If the options name a LongPPL evaluator, a second model, it selects the key tokens among the targets.
        """
        super().build_all_requests(**kwargs)
        if (evaluator := self.options.longppl_evaluator) is None:
            return
        scored = self.lengths.scored
        if len(scored) < 2:
            expected = f"{self.config.task}: expected at least two context_lengths for LongPPL"
            raise UserError(f"{expected}, found {list(scored)}: add a shorter one.")
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
        """Returns the indices of targets at which a document begins, or a range of key tokens begins or ends."""
        changes = np.flatnonzero(np.diff(self._key_tokens[block["start"]])) + 1 if self.metrics.longppl else ()
        return [*super().cuts(block, window), *map(int, changes)]

    def logged(self, doc: Mapping[str, Any], nll: WindowNll) -> dict[str, Any]:
        """Returns the values that a sample logs.

        With a LongPPL evaluator, `longppl@L` holds the NLL sums over the block's key tokens.
        """
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
        remedy = "name a results file of that task that this version wrote"
        raise UserError(f"{path} does not record which targets {task} scored: {remedy}.")
    return _Finished(*values)
