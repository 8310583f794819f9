"""The error for corpora that are neither given nor to be had from the network."""

from collections.abc import Sequence
from typing import NamedTuple

from sbeval.errors import UserError

OFFLINE_TASKS = "sb_niah_single_1, sb_niah_multikey_2, sb_niah_multikey_3, sb_ruler_vt, sb_ruler_cwe and sb_ruler_fwe"


class Missing(NamedTuple):
    """A corpus that could not be loaded.

    Attributes:
        key: the key of `--metadata` that gives a local copy.
        form: what the key takes, "DIR" or "FILE".
        source: where it was looked for.
        reason: what went wrong, in a word.
    """

    key: str
    form: str
    source: str
    reason: str


class MissingCorpus(UserError):
    """One or more corpora are missing; the message says how to give them, and which tasks need none.

    Args:
        missing: the corpora, at least one.
        tasks: the tasks that need them, where they are known.
    """

    def __init__(self, missing: Sequence[Missing], tasks: Sequence[str] = ()) -> None:
        self.missing = tuple(missing)
        where = ", ".join(f"{one.key} from {one.source} ({one.reason})" for one in missing)
        keys = ", ".join(f'"{one.key}": "{one.form}"' for one in missing)
        super().__init__(
            f"{', '.join(tasks) or 'RULER'} expected text that could not be loaded: {where}; give it with --metadata "
            f"'{{{keys}}}', or run {OFFLINE_TASKS}, which need none."
        )
