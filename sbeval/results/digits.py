"""How numbers are shown: differences with digits by their size, so that a small one is not zero, and times."""

import math

_MOST = 6


def change_text(
    estimate: float, low: float = math.nan, high: float = math.nan, *, least: int = 3
) -> tuple[str, str, str]:
    """Writes a difference and the ends of its interval (NaN for none) with signs, all three with the same digits.

    An interval is shown with two digits of its width, a difference without one with two of its own; large ones have
    `least` digits behind the point.
    """
    digits = decimals(estimate if math.isnan(high - low) else high - low, least=least)
    return f"{estimate:+.{digits}f}", f"{low:+.{digits}f}", f"{high:+.{digits}f}"


def with_interval(estimate: float, low: float = math.nan, high: float = math.nan) -> str:
    """Writes a difference, with its interval in brackets where it has one, such as "+0.120 [+0.100, +0.140]"."""
    text, *ends = change_text(estimate, low, high)
    return text if math.isnan(high - low) else f"{text} [{', '.join(ends)}]"


def decimals(size: float, *, least: int) -> int:
    """Returns the digits behind the point that show two digits of a number of this size, at least `least`."""
    if not math.isfinite(size) or size == 0:
        return least
    return min(_MOST, max(least, 1 - math.floor(math.log10(abs(size)))))


def time_text(seconds: float) -> str:
    """Writes a time such as "4.2 s", "57 s", "3.4 min" or "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    return f"{seconds / 60:.1f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
