"""`fixed_target`: the same targets at every length, so that a difference is the context's alone."""

from collections.abc import Mapping
from typing import Any

from sbeval.corpora.windows import TargetBlock, Window, document_target_blocks, stream_target_blocks, target_window
from sbeval.errors import UserError
from sbeval.tasks.perplexity.settings import DEFAULT_LENGTHS, MOST_TARGETS, Lengths
from sbeval.tasks.perplexity.task import PerplexityTask


class FixedTarget(PerplexityTask):
    """One window a block and length; all end with the block's targets."""

    protocol = "fixed_target"
    identical_targets = True
    default_context = "document"

    def targets_per_window(self) -> int:
        """Returns T: as asked for, else at most 256 and at most half the shortest length."""
        shortest = (self.settings.context_lengths or DEFAULT_LENGTHS)[0]
        targets = self.settings.targets_per_window or max(1, min(MOST_TARGETS, shortest // 2))
        if targets > shortest:
            raise UserError(
                f"{self.config.task}: expected targets_per_window of at most the shortest context length, {shortest}, "
                f"found {targets}: ask for fewer targets or longer context_lengths."
            )
        return targets

    def settle(self) -> Lengths:
        """Takes lengths that the text can fill to the left of the targets."""
        return self.settle_full_windows(targets=self.targets_per_window())

    def blocks(self) -> list[dict[str, Any]]:
        """One block is one run of targets; documents take turns."""
        longest, targets = self.lengths.scored[-1], self.targets_per_window()
        if self.context == "stream":
            bounds = list(stream_target_blocks(self.corpus.total_tokens, longest=longest, targets=targets))
        else:
            bounds = [
                (block.start, block.stop)
                for block in document_target_blocks(
                    self.corpus.starts[:-1],
                    self.corpus.stops,
                    longest=longest,
                    targets=targets,
                    blocks_per_document=self.settings.blocks_per_document,
                    seed=self.settings.seed,
                )
            ]
        return [{"block": index, "start": start, "stop": stop} for index, (start, stop) in enumerate(bounds)]

    def windows(self, block: Mapping[str, Any], context_length: int) -> list[Window]:
        """Returns the one window that ends with the block's targets."""
        return [target_window(TargetBlock(0, block["start"], block["stop"]), context_length)]
