"""Prompts read into free slots: many at once, or one in pieces, as memory allows."""

import logging
from collections import deque
from collections.abc import Sequence

from sbeval.model_adapters.batching import free_memory, out_of_memory
from sbeval.model_adapters.decoding.stepper import Stepper
from sbeval.model_adapters.decoding.texts import Text

logger = logging.getLogger(__name__)

FEWEST_PIECE_TOKENS = 256


class PromptReader:
    """Reads prompts.

    When memory runs out, half as many tokens are read at once from then on: fewer prompts, and then pieces of one.
    When it runs out for the smallest piece, reading waits until running texts are done; nothing is generated twice.

    Args:
        stepper: the model and its slots.
        waiting: texts, longest first; texts that have been read are removed.
        prompt_tokens: most tokens read at once, padding included; a longer prompt is read alone.
    """

    def __init__(self, stepper: Stepper, waiting: deque[Text], prompt_tokens: int) -> None:
        self._stepper, self._waiting = stepper, waiting
        self._at_once_tokens = max(prompt_tokens, *(len(text.so_far) for text in waiting))
        self._full = False

    def read(self, free: Sequence[int], *, alone: bool) -> list[tuple[int, Text]]:
        """Reads as many prompts as there are free slots, and returns each with its slot.

        Args:
            free: slots.
            alone: no text is running.

        Raises:
            RuntimeError: memory ran out for a piece of one prompt while nothing else runs.
        """
        started: list[tuple[int, Text]] = []
        while self._waiting and len(started) < len(free) and (alone or not self._full):
            longest = len(self._waiting[0].so_far)
            rows = min(max(1, self._at_once_tokens // longest), len(self._waiting), len(free) - len(started))
            chosen = [self._waiting[row] for row in range(rows)]
            slots = list(free[len(started) : len(started) + rows])
            try:
                self._stepper.start(
                    slots,
                    [text.so_far for text in chosen],
                    [text.budget_tokens for text in chosen],
                    fewest_tokens=[text.fewest_new_tokens for text in chosen],
                    answered_tokens=[len(text.answer) for text in chosen],
                    piece_tokens=self._at_once_tokens // rows,
                )
            except (RuntimeError, MemoryError) as error:
                fewer = min(self._at_once_tokens, rows * longest) // 2
                smallest = rows == 1 and fewer < FEWEST_PIECE_TOKENS
                if not out_of_memory(error) or (smallest and alone and not started):
                    raise
            else:
                started += zip(slots, (self._waiting.popleft() for _ in range(rows)), strict=True)
                continue
            free_memory()
            if smallest:
                self._full = True
                break
            self._at_once_tokens = fewer
            logger.warning("out of memory while reading prompts: going on with %d tokens at once", fewer)
        return started
