"""Numbers of results files that can be counted with."""

LARGEST_NATS = 700.0
"""NLL beyond which a perplexity is no number a computer holds."""
_LARGEST = 1e100


def usable_number(value: object) -> float | None:
    """Returns a number as a float; None for anything else, NaN, infinity and what has an infinite square."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _LARGEST else None
