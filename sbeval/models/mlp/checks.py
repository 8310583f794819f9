"""Whether what a configuration says of its experts has a meaning."""

from typing import TYPE_CHECKING

from sbeval.errors import UserError, shown

if TYPE_CHECKING:
    from sbeval.models.config import SbevalConfig


def check_experts(config: "SbevalConfig") -> None:
    """Checks the fields of a mixture of experts.

    Raises:
        UserError: they contradict each other, or there are no experts.
    """
    assert isinstance(config.bias, list)
    if config.num_experts is None and (config.num_experts_per_token or config.shared_intermediate_size):
        raise UserError("num_experts_per_token and shared_intermediate_size are for mixtures: give num_experts")
    if config.num_experts is not None and not 1 <= (config.num_experts_per_token or 0) <= config.num_experts:
        raise UserError(
            f"num_experts_per_token must be at least 1 and at most num_experts {config.num_experts}, got "
            f"{config.num_experts_per_token}"
        )
    if config.balanced_experts and not config.normalize_expert_weights:
        raise UserError("balanced_experts needs normalize_expert_weights")
    if config.num_experts is not None and "mlp" in config.bias:
        raise UserError(f"experts have no bias, got bias={shown(config.bias)}; leave mlp out")
