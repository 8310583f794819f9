"""Forgetting attention over a whole text by FlexAttention, which adds the bias itself and skips what is forgotten.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim, C extra channels.
"""

from torch import Tensor
from torch.nn.functional import pad

from sbeval.models.flex import ScoreMod, compiled_flex_attention, suits_flex, whole_blocks
from sbeval.models.forgetting.decay import sums_in
from sbeval.models.forgetting.skipping import blocks_from, oldest_blocks


def whole_text_attention(
    q_BHLC: Tensor,
    k_BGLC: Tensor,
    v_BGLC: Tensor,
    *,
    head_dim: int,
    scale: float,
    sliding_window: int | None,
    skip_threshold: float | None,
) -> Tensor | None:
    """Returns [B, H, L, D] of texts without padding, or None where another way is faster or this one does not run.

    Args:
        q_BHLC: queries from `with_decay`.
        k_BGLC: keys from `with_decay`.
        v_BGLC: values from `with_decay`.
        head_dim: how many channels are not the bias.
        scale: factor of the logits.
        sliding_window: keys with j - i < window only, of which none is skipped; None sees all.
        skip_threshold: largest change of an output by skipped keys, as a share of the largest value; None skips none.
    """
    q_BHLD, k_BGLD, v_BGLD = (x[..., :head_dim] for x in (q_BHLC, k_BGLC, v_BGLC))
    if not suits_flex(q_BHLD, k_BGLD, v_BGLD, k_BGLC):
        return None
    length = q_BHLD.shape[2]
    sums_BHL = sums_in(k_BGLC, head_dim, q_BHLD.shape[1] // k_BGLD.shape[1], scale).contiguous()
    oldest_BHR = None
    if skip_threshold and (sliding_window is None or sliding_window >= length):
        oldest_BHR = oldest_blocks(q_BHLD, k_BGLD, sums_BHL, scale=scale, threshold=skip_threshold)
    return compiled_flex_attention(
        q_BHLD,
        k_BGLD,
        v_BGLD,
        scale=scale,
        sliding_window=sliding_window or length,
        score_mod=decay_score_mod(sums_BHL),
        block_mask=None if oldest_BHR is None else blocks_from(oldest_BHR, whole_blocks(length)),
    )


def decay_score_mod(sums_BHL: Tensor) -> ScoreMod:
    """Returns the bias for FlexAttention, in fp32."""
    length = sums_BHL.shape[2]
    sums_BHL = pad(sums_BHL, (0, whole_blocks(length) - length))

    def add(logit: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return logit + (sums_BHL[batch, head, query] - sums_BHL[batch, head, key])

    return add
