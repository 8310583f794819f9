"""Makes text from result files safe to show: no control characters, no marks that turn the writing direction."""

import unicodedata

_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def shown_name(value: str) -> str:
    """Returns a name on one line without control characters and direction marks; letters of every script stay.

    Joiners stay too: emoji and several scripts are written with them.
    """
    line = " ".join(value.split())
    kept = (letter for letter in line if letter in _JOINERS or unicodedata.category(letter) not in ("Cc", "Cf", "Cs"))
    return "".join(kept).strip() or "unnamed"
