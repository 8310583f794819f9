"""Context-parallel scoring and prefill: each rank of a process group computes some chunks of a window or a prompt.

A window is one model input whose targets are scored. Norms, MLPs and logits need only the rank's own tokens; attention
exchanges keys and values. Every rank gets all scores of a window. After a prefill, one rank holds the KV cache of the
whole prompt.

Shape suffixes: B, L and N as in `scorer`, Q this rank's tokens, T tokens of a padded input, G key/value heads, D hidden
size, or head dimension for keys and values.
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
from sbeval.scoring.body import cache_argument
from sbeval.scoring.requests import NonFinite
from sbeval.scoring.scorer import PendingScores, Prefix, TokenScorer


def join_context(model: nn.Module, degree: int, device: torch.device) -> ContextParallel:
    """Makes process groups of `degree` ranks that score windows together; sets the model's group and returns it.

    Raises:
        UserError: the model does not support context parallelism, the number of processes is not a multiple of
            `degree`, or the ranks hold different models.
    """
    mixers = [module.mixer for module in model.modules() if isinstance(getattr(module, "mixer", None), nn.Module)]
    if not hasattr(model, "set_context_parallel") or not all(hasattr(mixer, "context_parallel") for mixer in mixers):
        raise UserError(
            f"context_parallel={degree} needs a model of this project with stick-breaking or softmax attention in "
            f"every layer, found {type(model).__name__}: remove context_parallel."
        )
    if any(getattr(module, "reads_previous_position", False) for module in model.modules()):
        raise UserError(
            f"context_parallel={degree} supports attention that reads only the keys and values of older tokens; this "
            "model has a decay or token shifts along the text: remove context_parallel."
        )
    processes = get_world_size() if is_available() and is_initialized() else 1
    if processes % degree:
        raise UserError(
            f"context_parallel={degree} needs a multiple of {degree} processes, found {processes}: start them with "
            f"`torchrun --nproc-per-node {degree} -m lm_eval ...`, or change context_parallel."
        )
    mesh = init_device_mesh(device.type, (processes // degree, degree), mesh_dim_names=("data", "context"))
    context = ContextParallel(mesh["context"].get_group())
    if len(set(context.gather_objects(_model_hash(model)))) > 1:
        raise UserError(
            f"The {degree} processes of a context_parallel group loaded different models: give every process the same "
            "arguments and the same files."
        )
    model.set_context_parallel(context)  # type: ignore[operator]
    return context


class ContextParallelScorer(TokenScorer):
    """A `TokenScorer` that can also score a window and prefill a prompt together with the other ranks of its group."""

    def __init__(self, model: nn.Module, context: ContextParallel, *, non_finite: NonFinite = "error") -> None:
        super().__init__(model, non_finite=non_finite)
        self.context = context
        self._local_positions: Tensor | None = None

    def start_together(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor
    ) -> PendingScores:
        """Scores as `start` does, but all ranks of the group compute together and must pass the same arguments.

        Raises:
            UserError: a target is not in the vocabulary, or the logits depend on more than the last hidden state.
        """
        self._check_splits(input_ids_BL)
        with self.context.shared():
            return self.start(input_ids_BL, row_N, position_N, target_N)

    @torch.no_grad()
    def read_together(self, input_ids_1L: Tensor, keeper: int, cache: Cache | None) -> None:
        """Prefills a prompt, int64 [1, L]. All ranks of the group compute together and must pass the same tokens.

        The rank `keeper` generates from the prompt: all keys and values are written to its `cache`. Other ranks pass
        None.

        Raises:
            UserError: the logits depend on more than the last hidden state.
        """
        self._check_splits(input_ids_1L)
        local_ids_1Q = self._local_tokens(input_ids_1L)
        gathering_cache = _GatheringCache(self.context, keeper, cache, input_ids_1L.shape[1])
        with self.context.shared():
            self._hidden(local_ids_1Q, gathering_cache)  # type: ignore[arg-type]

    def _check_splits(self, input_ids_BL: Tensor) -> None:
        if not self._splits(input_ids_BL):
            raise UserError(
                "context_parallel needs a model that computes its logits from the last hidden state, which "
                f"{type(self._whole).__name__} does not: remove context_parallel from --model_args."
            )

    def _local_tokens(self, input_ids_BL: Tensor) -> Tensor:
        """Right-pads the input, returns this rank's tokens [B, Q], and stores their positions."""
        tokens = self.context.padded_tokens(input_ids_BL.shape[1])
        self._local_positions = self.context.positions(tokens)[None].to(input_ids_BL.device)
        padded_BT = torch.nn.functional.pad(input_ids_BL, (0, tokens - input_ids_BL.shape[1]))
        return padded_BT.index_select(1, self._local_positions[0])

    def _scores(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor, after: Prefix | None
    ) -> tuple[Tensor, Tensor]:
        if not self.context.active:
            return super()._scores(input_ids_BL, row_N, position_N, target_N, after)
        tokens = self.context.padded_tokens(input_ids_BL.shape[1])
        local_positions = self.context.positions(tokens)
        # from a position in the sequence to its index among this rank's tokens, -1 for other ranks' positions
        local_index = torch.full((tokens,), -1)
        local_index[local_positions] = torch.arange(len(local_positions))
        is_local_N = local_index[position_N] >= 0
        local_scores = super()._scores(
            self._local_tokens(input_ids_BL),
            row_N[is_local_N],
            local_index[position_N[is_local_N]],
            target_N[is_local_N],
            None,
        )
        scores_2N = torch.zeros((2, len(target_N)), device=local_scores[0].device)
        scores_2N[:, is_local_N.to(scores_2N.device)] = torch.stack([each.float() for each in local_scores])
        logprobs, greedy = self.context.sum(scores_2N)
        return logprobs, greedy > 0

    def _hidden(self, input_ids_BL: Tensor, cache: DynamicCache | None = None) -> Tensor:
        if not self.context.active:
            return super()._hidden(input_ids_BL, cache)
        assert self._body is not None
        caching = {"use_cache": False} if cache is None else {cache_argument(self._body): cache, "use_cache": True}
        output = self._body(input_ids=input_ids_BL, position_ids=self._local_positions, **caching)
        hidden_BQD: Tensor = output.last_hidden_state
        return hidden_BQD


class _GatheringCache:
    """The KV cache during a prefill: gathers all ranks' keys and values on rank `keeper`, without the padding."""

    def __init__(self, context: ContextParallel, keeper: int, cache: Cache | None, tokens: int) -> None:
        self._context = context
        self._keeper = keeper
        self._cache = cache
        self._tokens = tokens

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Returns 0: a prompt is prefilled in one forward pass."""
        return 0

    def update(self, k_BGQD: Tensor, v_BGQD: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Gathers keys and values for `keeper`'s cache; returns its arguments, as attention exchanges keys itself."""
        k_BGTD, v_BGTD = (self._context.gather(local, self._keeper) for local in (k_BGQD, v_BGQD))
        if self._cache is not None:
            assert k_BGTD is not None
            assert v_BGTD is not None
            self._cache.update(k_BGTD[:, :, : self._tokens], v_BGTD[:, :, : self._tokens], layer_index)
        return k_BGQD, v_BGQD


@torch.no_grad()
def _model_hash(model: Any) -> str:
    """Returns a hash of the configuration, the sums of the weights and the kernels, which all ranks must share."""
    sums = [float(weight.double().sum()) for weight in model.parameters()]
    kernels = [str(module.kernels) for module in model.modules() if hasattr(module, "kernels")]
    return hashlib.sha256(f"{model.config.to_json_string()}{sums}{kernels}".encode()).hexdigest()
