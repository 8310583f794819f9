"""What extrapolation/README.md begins with: what the longest context changes for every scheme, and its figure."""

from research.published_results.found import FIXED, NAMES, Found

SCHEMES = ("stickbreaking", "alibi", "rope_window_1024", "fire", "forgetting", "rope", "nope")
"""The schemes trained once at 1x, and evaluated as trained."""
LEVEL_NATS = 0.05


def headline(found: Found) -> list[str]:
    """Returns a sentence and the figure; nothing where no scheme was evaluated at both lengths."""
    changes = {
        scheme: end - start
        for scheme in SCHEMES
        if (end := found.nll(scheme, FIXED, 16)) is not None and (start := found.nll(scheme, FIXED, 1)) is not None
    }
    sides = {
        "falls with": [scheme for scheme, nats in changes.items() if nats < -LEVEL_NATS],
        f"stays within {LEVEL_NATS:g} with": [scheme for scheme, nats in changes.items() if abs(nats) <= LEVEL_NATS],
        "rises with": [scheme for scheme, nats in changes.items() if nats > LEVEL_NATS],
    }
    parts = [
        f"{verb} {'; '.join(f'{NAMES[scheme]} ({changes[scheme]:+.2f})' for scheme in schemes)}"
        for verb, schemes in sides.items()
        if schemes
    ]
    if not parts:
        return []
    return [
        f"**From the training length to 16 times of it, NLL of the same targets {'. It '.join(parts)}.** Nats per "
        "token, the longer context minus the shorter, seed 0 of each scheme.",
        "",
        "![NLL against context length, one file](figures/schemes-fixed_target.png)",
        "",
    ]
