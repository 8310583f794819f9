"""Learning-rate factors as plain functions of the step."""

import math


def cosine(step: int, *, steps: int, warmup_steps: int) -> float:
    """Returns the factor of the peak learning rate: linear warm-up, then half a cosine to zero.

    Args:
        step: optimizer steps done, from 0.
        steps: of the whole run.
        warmup_steps: until the peak.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * _share(step, warmup_steps, steps)))


def warmup_stable_decay(step: int, *, steps: int, warmup_steps: int, decay_share: float = 0.2) -> float:
    """Returns the factor of the peak learning rate: linear warm-up, constant, then 1 - sqrt down to zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = max(warmup_steps, round(steps * (1.0 - decay_share)))
    return 1.0 - math.sqrt(_share(step, decay_start, steps))


def extension(step: int, *, steps: int, warmup_steps: int, first_share: float = 0.08) -> float:
    """Returns the factor of context extension (Tan et al. 2025, appendix C.1).

    From `first_share` of the peak linearly up to the peak, then (e^(1-x) - 1) / (e - 1) with x from 0 to 1: an
    exponential decay that reaches zero.
    """
    if step < warmup_steps:
        return first_share + (1.0 - first_share) * step / warmup_steps
    return (math.exp(1.0 - _share(step, warmup_steps, steps)) - 1.0) / (math.e - 1.0)


def _share(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
