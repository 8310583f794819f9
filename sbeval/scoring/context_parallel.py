"""Scores of windows that several processes hold together, each a part of the tokens.

Norms, MLPs and logits are a process's own; attention asks the others. Every process gets every score.

Shape suffixes: as in `scorer`.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size, is_available, is_initialized
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache

from sbeval.attention.context_parallel import ContextParallel
from sbeval.errors import UserError
from sbeval.scoring.requests import NonFinite
from sbeval.scoring.scorer import PendingScores, Prefix, TokenScorer


def join_context(model: nn.Module, degree: int, device: torch.device) -> ContextParallel:
    """Makes groups of `degree` processes that score windows together; each group takes texts of its own.

    Raises:
        UserError: the model cannot be shared so, processes are missing or left over, or they hold different models.
    """
    mixers = [module.mixer for module in model.modules() if isinstance(getattr(module, "mixer", None), nn.Module)]
    if not hasattr(model, "set_context_parallel") or not all(hasattr(mixer, "context_parallel") for mixer in mixers):
        raise UserError(
            "Expected a model of this family with stick-breaking or softmax attention in every layer for "
            f"context_parallel={degree}, found {type(model).__name__}: leave context_parallel out."
        )
    if any(getattr(module, "looks_back", False) for module in model.modules()):
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
    """Scores alone, as its base does, or together with the other processes of a group.

    Args:
        model: told of the group by `join_context`.
        context: the group.
        non_finite: whether a log-probability that is not finite is an error, or NaN among the scores.
    """

    def __init__(self, model: nn.Module, context: ContextParallel, *, non_finite: NonFinite = "error") -> None:
        super().__init__(model, non_finite=non_finite)
        self.context = context
        self._own_positions: Tensor | None = None

    def start_together(
        self, input_ids_BL: Tensor, row_N: Tensor, position_N: Tensor, target_N: Tensor
    ) -> PendingScores:
        """Scores as `start` does; all processes of the group must call it with the same arguments.

        Raises:
            UserError: the model does not know a target, or its logits need more than its body's last hidden state.
        """
        if not self._splits(input_ids_BL):
            raise UserError(
                "Expected a model whose logits follow from its body's last hidden state for context_parallel, found "
                f"{type(self._whole).__name__}: leave it out of --model_args."
            )
        with self.context.shared():
            return self.start(input_ids_BL, row_N, position_N, target_N)

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
        self._own_positions = own[None].to(input_ids_BL.device)
        padded_BT = torch.nn.functional.pad(input_ids_BL, (0, tokens - input_ids_BL.shape[1]))
        found = super()._scores(
            padded_BT.index_select(1, self._own_positions[0]),
            row_N[mine_N],
            place[position_N[mine_N]],
            target_N[mine_N],
            None,
        )
        together = torch.zeros((2, len(target_N)), device=found[0].device)
        together[:, mine_N.to(together.device)] = torch.stack([each.float() for each in found])
        logprobs, greedy = self.context.sum(together)
        return logprobs, greedy > 0

    def _hidden(self, input_ids_BL: Tensor, cache: DynamicCache | None = None) -> Tensor:
        if not self.context.active:
            return super()._hidden(input_ids_BL, cache)
        assert self._body is not None
        output = self._body(input_ids=input_ids_BL, position_ids=self._own_positions, use_cache=False)
        hidden_BQD: Tensor = output.last_hidden_state
        return hidden_BQD


@torch.no_grad()
def _facts(model: Any) -> str:
    """What must be alike in all processes: the configuration and, by their sums, the weights."""
    sums = [float(weight.double().sum()) for weight in model.parameters()]
    kernels = [str(module.kernels) for module in model.modules() if hasattr(module, "kernels")]
    return hashlib.sha256(f"{model.config.to_json_string()}{sums}{kernels}".encode()).hexdigest()
