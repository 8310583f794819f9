"""Metric keys of results files that can be shown: those whose context length is one."""

from sbeval.records import parse_metric_key

_LONGEST_TOKENS = 1 << 40


def context_metric(key: str) -> tuple[str, int] | None:
    """Splits a metric key into metric and context length; None where it names no length of 1 token to 2^40."""
    parsed = parse_metric_key(key)
    return parsed if parsed is not None and is_length(parsed[1]) else None


def is_length(tokens: int) -> bool:
    """Whether a number can be a context length."""
    return 1 <= tokens <= _LONGEST_TOKENS
