"""What a report left out, and why: collected while reading, shown on the page."""

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One thing left out of a report.

    Attributes:
        path: the file it is about, None where it is about no single file.
        reason: one sentence for the reader.
    """

    path: Path | None
    reason: str


class Notes(list[Note]):
    """Notes in the order they were met."""

    def add(self, path: Path | None, reason: str) -> None:
        """Appends a note unless the same one is there already."""
        note = Note(path=path, reason=reason)
        if note not in self:
            self.append(note)
