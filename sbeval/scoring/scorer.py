"""Log-probabilities of target tokens, without holding the logits [length, vocabulary] of a whole input.

The model's body runs once over the whole input. The head then runs over chunks of the scored positions: the full model
is called while its body's forward is patched to return the hidden states. So whatever the model does to its logits
(soft-capping, scaling) is applied, and nothing is assumed about the head. Before that, the first 16 tokens are run both
in this way and by the model's ordinary forward. If the logits differ or the split fails, the ordinary forward is used
for everything.

Shape suffixes: B rows, L input length, P prefix length, N scored positions, C positions of one chunk, D hidden size, V
vocabulary.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sbeval.errors import UserError
from sbeval.scoring.body import body_of, body_returns, cache_argument, no_cache, same_but_for_rounding, unwrapped
from sbeval.scoring.non_finite import check_finite
from sbeval.scoring.requests import NonFinite

logger = logging.getLogger(__name__)

Prefix = DynamicCache
"""The KV cache of tokens that several inputs begin with."""

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Number of logits of a chunk, by device: 64 MiB in fp32 on a CPU; 128 MiB in bf16 on a GPU, enough to keep it busy."""


class TokenScores(NamedTuple):
    """Scores of target tokens, on the CPU.

    Attributes:
        logprobs: float32 [N], log-probabilities in nats.
        greedy: bool [N], whether each target is the most probable token.
    """

    logprobs: Tensor
    greedy: Tensor


class PendingScores:
    """Scores that a GPU may still be computing.

    `check` is called with the log-probabilities once they are on the CPU. It may change them in place, or raise.
    """

    def __init__(self, logprobs_N: Tensor, greedy_N: Tensor, check: Callable[[Tensor], None]) -> None:
        self._check = check
        self._copied: torch.cuda.Event | None = None
        later = logprobs_N.is_cuda  # only CUDA has events that tell when an asynchronous copy is complete
        self._scores = TokenScores(*(x.to("cpu", non_blocking=later) for x in (logprobs_N, greedy_N)))
        if later:
            with torch.cuda.device(logprobs_N.device):
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def result(self) -> TokenScores:
        """Waits until these scores are on the CPU, but not for work that was queued later, and returns them.

        Raises:
            NonFiniteError: a log-probability is not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._check(self._scores.logprobs)
        return self._scores


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies an integer tensor to a device, through pinned memory, without waiting for work queued on a GPU."""
    if device.type == "cuda" and not tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.numpy()[...] = tensor.numpy()
        return pinned.to(device, non_blocking=True)
    return tensor.to(device)


class TokenScorer:
    """Scores target tokens with a causal language model, of this project or transformers', with or without PEFT.

    Args:
        model: the model.
        chunk_logits: number of logits computed at once; None chooses by device (`CHUNK_LOGITS`).
        non_finite: "error" raises if a log-probability is not finite, "null" returns NaN in its place.
    """

    def __init__(self, model: nn.Module, *, chunk_logits: int | None = None, non_finite: NonFinite = "error") -> None:
        self.model = model
        self.chunk_logits = chunk_logits
        self.non_finite = non_finite
        self._whole = unwrapped(model)
        self._body = body_of(self._whole)
        self._comes_apart: bool | None = None if self._body is not None else False
        self._output_class: type[Any] | None = None

    def score(self, *inputs: Tensor, after: Prefix | None = None) -> TokenScores:
        """Scores tokens as `start` does, with the same arguments, and waits for the result.

        Raises:
            NonFiniteError: a log-probability is not finite.
            UserError: a target is not in the model's vocabulary.
        """
        return self.start(*inputs, after=after).result()

    @torch.no_grad()
    def start(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor, *, after: Prefix | None = None
    ) -> PendingScores:
        """Scores target n as the token that follows `input_ids_BL[row_N[n], : position_N[n] + 1]`.

        Rows shorter than L are right-padded with any valid token. On a GPU the work is queued, and the call returns.

        Args:
            input_ids_BL: int64 [B, L] model inputs.
            row_N: int64 [N], the row of each target. Pass this and the next two tensors on the CPU: if they are on a
                GPU, the call waits.
            position_N: int64 [N], the input position whose output predicts the target.
            target_N: int64 [N] token ids.
            after: the KV cache of tokens before every row, from `read`; positions do not count these tokens. The cache
                can be used again.

        Raises:
            UserError: a target is not in the model's vocabulary.
        """
        logprobs, greedy = self._scores(input_ids_BL, row_N, position_N, target_N, after)
        prefix_tokens = 0 if after is None else int(after.get_seq_length())

        def check(logprobs: Tensor) -> None:
            if self.non_finite == "null":
                logprobs[~logprobs.isfinite()] = torch.nan
            else:
                check_finite(logprobs, row_N.cpu(), prefix_tokens + position_N.cpu())

        return PendingScores(logprobs, greedy, check)

    def _scores(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor, after: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [N] and whether each target is the most probable token [N], on the device."""
        if splits := self._splits(input_ids_BL):
            hidden_BLD = self._hidden(input_ids_BL) if after is None else self._hidden_after(after, input_ids_BL)
            device = hidden_BLD.device
            skipped = 0
        else:
            logits_BLV = self._own_logits(input_ids_BL)
            # PEFT's prompt tuning puts a learned prompt before the input
            device = logits_BLV.device
            skipped = logits_BLV.shape[1] - input_ids_BL.shape[1]
        rows, positions, targets = (to_device(x, device) for x in (row_N, position_N, target_N))
        positions = positions + skipped

        def logits_of(chunk: slice) -> Tensor:
            if splits:
                return self._head(hidden_BLD[rows[chunk], positions[chunk]][None])[0]
            return logits_BLV[rows[chunk], positions[chunk]]

        # NumPy, because PyTorch wakes all cores for tens of thousands of numbers, which can take milliseconds
        target_ids = target_N.cpu().numpy()
        lowest, highest = (int(target_ids.min()), int(target_ids.max())) if len(target_ids) else (0, 0)
        return self._in_chunks(logits_of, targets, lowest, highest)

    @torch.no_grad()
    def read(self, prefix_P: Tensor) -> Prefix | None:
        """Prefills tokens int64 [P] that several inputs begin with, and returns their KV cache for `start`.

        Returns None if the cache cannot be reused: with sliding windows, recurrent states and learned prompts.
        """
        cache = self._croppable_cache() if self._splits(prefix_P[None]) else None
        if cache is not None:
            self._hidden(prefix_P[None], cache)
        return cache

    def _in_chunks(
        self, logits_of: Callable[[slice], Tensor], target_N: Tensor, lowest: int, highest: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = [torch.empty(0, device=target_N.device)]
        greedy = [torch.empty(0, dtype=torch.bool, device=target_N.device)]
        chunk_logits = self.chunk_logits or CHUNK_LOGITS.get(target_N.device.type, CHUNK_LOGITS["cpu"])
        chunk_tokens = max(1, chunk_logits // self._vocabulary())
        for first in range(0, len(target_N), chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            logits_CV = logits_of(chunk)
            if lowest < 0 or highest >= logits_CV.shape[1]:
                raise UserError(
                    f"Expected token ids below {logits_CV.shape[1]}, the model's number of logits, found "
                    f"{highest if lowest >= 0 else lowest} among the targets: use the tokenizer of this model."
                )
            chunk_logprobs, chunk_greedy = target_logprobs(logits_CV, target_N[chunk].to(logits_CV.device))
            logprobs.append(chunk_logprobs.to(target_N.device))
            greedy.append(chunk_greedy.to(target_N.device))
        return torch.cat(logprobs), torch.cat(greedy)

    def _splits(self, input_ids_BL: Tensor) -> bool:
        if self._comes_apart is None:
            self._comes_apart = self._reproduces_logits(input_ids_BL)
        return self._comes_apart

    def _croppable_cache(self) -> DynamicCache | None:
        config: Any = getattr(self._whole, "config", None)
        try:
            cache = DynamicCache(config=config)
        except (AttributeError, KeyError, TypeError):
            return None
        return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None

    def _hidden(self, input_ids_BL: Tensor, cache: DynamicCache | None = None) -> Tensor:
        assert self._body is not None
        caching = no_cache(self._body) if cache is None else {cache_argument(self._body): cache, "use_cache": True}
        output = self._body(input_ids=input_ids_BL, **caching)
        self._output_class = type(output)
        hidden_BLD: Tensor = output.last_hidden_state
        return hidden_BLD

    def _hidden_after(self, prefix: Prefix, input_ids_BL: Tensor) -> Tensor:
        rows, length = input_ids_BL.shape
        if rows == 1:  # appends to the cache and crops it again, which saves a copy of a long prefix
            hidden_BLD = self._hidden(input_ids_BL, prefix)
            prefix.crop(-length)
            return hidden_BLD
        config: Any = getattr(self._whole, "config", None)
        layers: list[Any] = list(prefix.layers)
        expanded = [tuple(x.expand(rows, -1, -1, -1) for x in (layer.keys, layer.values)) for layer in layers]
        return self._hidden(input_ids_BL, DynamicCache(expanded, config=config))

    def _head(self, hidden_BCD: Tensor) -> Tensor:
        assert self._body is not None
        placeholder_BC = torch.zeros(hidden_BCD.shape[:2], dtype=torch.long, device=hidden_BCD.device)
        assert self._output_class is not None
        # accelerate's hook on the full model would copy the unused input to the first of several GPUs, and wait
        hooked = not getattr(getattr(self._whole, "_hf_hook", None), "offload", True)
        forward = getattr(self._whole, "_old_forward", self._whole) if hooked else self._whole
        with body_returns(self._body, self._output_class(last_hidden_state=hidden_BCD)):
            logits_BCV: Tensor = forward(input_ids=placeholder_BC, **no_cache(self._whole)).logits
        return logits_BCV

    def _own_logits(self, input_ids_BL: Tensor) -> Tensor:
        logits_BLV: Tensor = self.model(input_ids=input_ids_BL, **no_cache(self.model)).logits
        return logits_BLV

    def _vocabulary(self) -> int:
        output_embeddings: Any = getattr(self._whole, "get_output_embeddings", lambda: None)
        weight = getattr(output_embeddings(), "weight", None)
        return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else 2**17

    def _reproduces_logits(self, input_ids_BL: Tensor) -> bool:
        sample_BL = input_ids_BL[:1, :16]
        expected = self._own_logits(sample_BL)
        # OPT's forward does not call its base model, but the decoder inside it
        for body in (self._body, getattr(self._body, "decoder", None)):
            if isinstance(body, nn.Module):
                self._body = body
                if self._has_logits(sample_BL, expected):
                    return True
        logger.warning(
            "%s computes its logits from more than the last hidden state: scoring runs its ordinary forward, which "
            "holds the logits of a whole input in memory",
            type(self._whole).__name__,
        )
        return False

    def _has_logits(self, sample_BL: Tensor, expected_BLV: Tensor) -> bool:
        """Whether body and head, run one after the other, give the logits of the whole model."""
        try:
            logits_BLV = self._head(self._hidden(sample_BL))
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            logger.debug("body and head of %s cannot be run separately: %s", type(self._whole).__name__, error)
            return False
        return same_but_for_rounding(logits_BLV, expected_BLV)


def target_logprobs(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 [N] log-probabilities of the targets, and bool [N] whether each is the most probable token.

    Logits are converted to fp32 before the softmax; fp64 logits stay in fp64 until the result is rounded.
    """
    if logits_NV.is_cuda and logits_NV.dtype != torch.float64:
        # imported here because Triton is not installed on every machine
        from sbeval.scoring.logprob_kernel import kernel_target_logprobs

        return kernel_target_logprobs(logits_NV, target_N)
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    # on a CPU, log_softmax takes two thirds of logsumexp's time, and max two thirds of argmax's. For equal logits, both
    # return the first
    logprobs_N = logits_NV.log_softmax(dim=1).gather(1, target_N[:, None]).squeeze(1)
    return logprobs_N.float(), logits_NV.max(dim=1).indices == target_N
