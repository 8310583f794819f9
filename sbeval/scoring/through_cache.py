"""Log-probabilities of target tokens that a model reads through a replaced KV cache, as in decoding.

The context, all inputs before the first target's position, is one prefill, which fills the cache. The inputs from there
on are read in chunks, teacher-forced: each chunk attends to the keys and values that the cache returns. A quantized
cache returns the tokens behind its residual rounded, those of earlier chunks too. Its chunks are as long as its
residual, so that it rounds at the same tokens as if the inputs were read one by one: both give the same scores.

If the first target is predicted by the first input, there is no context, and the first chunk is this input alone.

Shape suffixes: B rows, L input length, N scored positions, P positions from the first scored one on, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sbeval.caches.build import CacheBuilder
from sbeval.errors import UserError
from sbeval.scoring.requests import NonFinite
from sbeval.scoring.scorer import Prefix, TokenScorer, to_device


class CacheScorer(TokenScorer):
    """A `TokenScorer` that scores each row through an empty cache from `builder`.

    Args:
        model: the model.
        builder: makes the caches.
        non_finite: as in `TokenScorer`.

    Attributes:
        builder: makes the caches.
    """

    def __init__(self, model: nn.Module, builder: CacheBuilder, *, non_finite: NonFinite = "error") -> None:
        super().__init__(model, non_finite=non_finite)
        self.builder = builder

    def read(self, prefix_P: Tensor) -> Prefix | None:
        """Returns None: rows do not share a prefill, since each has a cache of its own."""
        return None

    @torch.no_grad()
    def filled(self, input_ids_1L: Tensor) -> Any:
        """Returns a new cache after the prefill of a prompt, int64 [1, L]."""
        if self._body is None:
            raise UserError(
                f"cache={self.builder.choice} needs a model of transformers: remove cache from --model_args."
            )
        cache: Any = self.builder.make(input_ids_1L.shape[1])
        with self.builder.explaining():
            self._hidden(input_ids_1L, cache)
        return cache

    def _scores(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor, after: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        if after is not None:
            raise ValueError("a replaced cache does not continue a prefix")
        if not self._splits(input_ids_BL):
            raise UserError(
                f"cache={self.builder.choice} needs hidden states, but {type(self._whole).__name__} computes its "
                "logits from more than the last ones: remove cache from --model_args."
            )
        first_N, hidden = torch.zeros_like(position_N), []
        offset = 0
        for row, input_ids_L in enumerate(input_ids_BL):
            in_row = row_N == row
            positions = position_N[in_row]
            if not len(positions):
                continue
            first, last = int(positions.min()), int(positions.max())
            hidden_PD = self._hidden_from(input_ids_L[None, : last + 1], first)
            first_N[in_row] = offset - first
            offset += len(hidden_PD)
            hidden.append(hidden_PD)
        hidden_all = torch.cat(hidden) if hidden else None
        device = input_ids_BL.device if hidden_all is None else hidden_all.device
        places, targets = to_device(position_N + first_N, device), to_device(target_N, device)

        def logits_of(chunk: slice) -> Tensor:
            assert hidden_all is not None
            return self._head(hidden_all[places[chunk]][None])[0]

        lowest, highest = (int(target_N.min()), int(target_N.max())) if len(target_N) else (0, 0)
        return self._in_chunks(logits_of, targets, lowest, highest)

    def _hidden_from(self, input_ids_1L: Tensor, first: int) -> Tensor:
        """Returns the hidden states [P, D] from position `first` on, read through a new cache."""
        length = input_ids_1L.shape[1]
        cache: Any = self.builder.make(length)
        begin = first
        chunk_tokens = self.builder.chunk_tokens or length
        hidden = []
        with self.builder.explaining():
            if first:
                self._hidden(input_ids_1L[:, :first], cache)
            while begin < length:
                stop = 1 if begin == 0 else min(begin + chunk_tokens, length)
                hidden.append(self._hidden(input_ids_1L[:, begin:stop], cache)[0])
                begin = stop
            held = int(cache.get_seq_length())
        if held != length:
            raise UserError(
                f"Expected cache={self.builder.choice} to count the {length} tokens that the model has read, found "
                f"{held}: return the number of tokens read from get_seq_length, also if the cache holds fewer."
            )
        return torch.cat(hidden)
