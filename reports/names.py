"""Makes text from result files safe to show: no control characters, no marks that turn the writing direction."""

import re
import unicodedata

_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
# folders that say what lies in them, not which model it is
_PLAIN_FOLDER = re.compile(r"(checkpoint|model|run|output|final|last|latest|best|hf)s?", re.IGNORECASE)
_NUMBERED_FOLDER = re.compile(r"(checkpoint|step|epoch)[-_]?\d+", re.IGNORECASE)


def telling_name(name: str, pretrained: str) -> str:
    """Returns a checkpoint's name; where that is `checkpoint` or the like, the folder above that says more.

    Args:
        name: the last part of the checkpoint's path, as recorded.
        pretrained: the path.
    """
    parts = [part for part in pretrained.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    numbered = _NUMBERED_FOLDER.fullmatch(name) is not None
    if not parts or parts[-1] != name or not (numbered or _PLAIN_FOLDER.fullmatch(name)):
        return name
    above = next((part for part in reversed(parts[:-1]) if not _PLAIN_FOLDER.fullmatch(part)), None)
    if above is None:
        return name
    return f"{above}/{name}" if numbered else above


def shown_name(value: str) -> str:
    """Returns a name on one line without control characters and direction marks; letters of every script stay.

    Joiners stay too: emoji and several scripts are written with them.
    """
    line = " ".join(value.split())
    kept = (letter for letter in line if letter in _JOINERS or unicodedata.category(letter) not in ("Cc", "Cf", "Cs"))
    return "".join(kept).strip() or "unnamed"
