"""Scores windows, and reads prompts, of which each process of a group holds a part of the tokens.

Norms, MLPs and logits need only a process's own tokens; attention asks the others. Every process gets all scores of a
window; one process gets all keys and values of a prompt.

Shape suffixes: as in `scorer`.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size, is_available, is_initialized
from torch.distributed.device_mesh import init_device_mesh
from transformers import Cache, DynamicCache

from sbeval.attention.context_parallel import ContextParallel
from sbeval.errors import UserError
from sbeval.scoring.requests import NonFinite
from sbeval.scoring.scorer import PendingScores, Prefix, TokenScorer


def join_context(model: nn.Module, degree: int, device: torch.device) -> ContextParallel:
    """Makes groups of `degree` processes that score windows together.

    Raises:
        UserError: the model does not support it, processes are missing or left over, or they hold different models.
    """
    mixers = [module.mixer for module in model.modules() if isinstance(getattr(module, "mixer", None), nn.Module)]
    if not hasattr(model, "set_context_parallel") or not all(hasattr(mixer, "context_parallel") for mixer in mixers):
        raise UserError(
            "Expected a model of this family with stick-breaking or softmax attention in every layer for "
            f"context_parallel={degree}, found {type(model).__name__}: leave context_parallel out."
        )
    if any(getattr(module, "reads_previous_position", False) for module in model.modules()):
        raise UserError(
            "Expected attention that needs nothing of older tokens but their keys and values for "
            f"context_parallel={degree}, found decay or shifts along the text: leave context_parallel out."
        )
    processes = get_world_size() if is_available() and is_initialized() else 1
    if processes % degree:
        raise UserError(
            f"Expected processes in groups of context_parallel={degree}, found {processes}: start a multiple of "
            f"{degree}, as in `torchrun --nproc-per-node {degree} -m lm_eval ...`, or correct context_parallel."
        )
    mesh = init_device_mesh(device.type, (processes // degree, degree), mesh_dim_names=("data", "context"))
    context = ContextParallel(mesh["context"].get_group())
    if len(set(context.gather_objects(_facts(model)))) > 1:
        raise UserError(
            f"Expected one model in all {degree} processes of context_parallel, found several: give every process the "
            "same arguments and the same files."
        )
    model.set_context_parallel(context)  # type: ignore[operator]
    return context


class ContextParallelScorer(TokenScorer):
    """Scores alone, as its base class does, or together with the other processes of a model's group."""

    def __init__(self, model: nn.Module, context: ContextParallel, *, non_finite: NonFinite = "error") -> None:
        super().__init__(model, non_finite=non_finite)
        self.context = context
        self._own_positions: Tensor | None = None

    def start_together(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor
    ) -> PendingScores:
        """Scores as `start` does; all processes of the group must call it with the same arguments.

        Raises:
            UserError: a target is not in the vocabulary, or logits need more than the body's last hidden state.
        """
        self._check_splits(input_ids_BL)
        with self.context.shared():
            return self.start(input_ids_BL, row_N, position_N, target_N)

    @torch.no_grad()
    def read_together(self, input_ids_1L: Tensor, keeper: int, cache: Cache | None) -> None:
        """Reads tokens int64 [1, L]; all processes of the group must call it with the same ones.

        The process of rank `keeper` continues the prompt, and writes all keys and values to its cache; others have
        None.

        Raises:
            UserError: logits need more than the body's last hidden state.
        """
        self._check_splits(input_ids_1L)
        own_ids_1Q = self._own_part(input_ids_1L)
        kept = _KeptByOne(self.context, keeper, cache, input_ids_1L.shape[1])
        with self.context.shared():
            self._hidden(own_ids_1Q, kept)  # type: ignore[arg-type]

    def _check_splits(self, input_ids_BL: Tensor) -> None:
        if not self._splits(input_ids_BL):
            raise UserError(
                "Expected a model whose logits follow from its body's last hidden state for context_parallel, found "
                f"{type(self._whole).__name__}: leave it out of --model_args."
            )

    def _own_part(self, input_ids_BL: Tensor) -> Tensor:
        """Returns [B, Q] tokens of this process, after padding at the end, and stores their positions."""
        tokens = self.context.padded_tokens(input_ids_BL.shape[1])
        self._own_positions = self.context.positions(tokens)[None].to(input_ids_BL.device)
        padded_BT = torch.nn.functional.pad(input_ids_BL, (0, tokens - input_ids_BL.shape[1]))
        return padded_BT.index_select(1, self._own_positions[0])

    def _scores(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor, after: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        if not self.context.active:
            return super()._scores(input_ids_BL, row_N, position_N, target_N, after)
        tokens = self.context.padded_tokens(input_ids_BL.shape[1])
        own = self.context.positions(tokens)
        place = torch.full((tokens,), -1)
        place[own] = torch.arange(len(own))
        mine_N = place[position_N] >= 0
        found = super()._scores(
            self._own_part(input_ids_BL), row_N[mine_N], place[position_N[mine_N]], target_N[mine_N], None
        )
        together = torch.zeros((2, len(target_N)), device=found[0].device)
        together[:, mine_N.to(together.device)] = torch.stack([each.float() for each in found])
        logprobs, greedy = self.context.sum(together)
        return logprobs, greedy > 0

    def _hidden(self, input_ids_BL: Tensor, cache: DynamicCache | None = None) -> Tensor:
        if not self.context.active:
            return super()._hidden(input_ids_BL, cache)
        assert self._body is not None
        caching = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
        output = self._body(input_ids=input_ids_BL, position_ids=self._own_positions, **caching)
        hidden_BQD: Tensor = output.last_hidden_state
        return hidden_BQD


class _KeptByOne:
    """The cache of layers while a prompt is read: `keeper` keeps keys and values of all processes, none of padding."""

    def __init__(self, context: ContextParallel, keeper: int, cache: Cache | None, tokens: int) -> None:
        self._context = context
        self._keeper = keeper
        self._cache = cache
        self._tokens = tokens

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Nothing was read before."""
        return 0

    def update(self, k_BGQD: Tensor, v_BGQD: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Returns its arguments: attention asks other processes for their keys as it does without a cache."""
        k_BGTD, v_BGTD = (self._context.gather(own, self._keeper) for own in (k_BGQD, v_BGQD))
        if self._cache is not None:
            assert k_BGTD is not None
            assert v_BGTD is not None
            self._cache.update(k_BGTD[:, :, : self._tokens], v_BGTD[:, :, : self._tokens], layer_index)
        return k_BGQD, v_BGQD


@torch.no_grad()
def _facts(model: Any) -> str:
    """What must be equal in all processes: the configuration and the sums of the weights."""
    sums = [float(weight.double().sum()) for weight in model.parameters()]
    kernels = [str(module.kernels) for module in model.modules() if hasattr(module, "kernels")]
    return hashlib.sha256(f"{model.config.to_json_string()}{sums}{kernels}".encode()).hexdigest()
