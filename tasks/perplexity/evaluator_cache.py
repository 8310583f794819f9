"""Log-probabilities of a LongPPL evaluator, kept on disk: they are the same for every model it judges."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import cache_folder
from sbeval.errors import UserError
from sbeval.token_logprobs import TokenLogprobsRequest

_SECONDS_TO_WAIT = 60.0
_ANSWERS_A_WRITE = 32


class EvaluatorCache:
    """One evaluator's answers, by request; several processes may share it.

    A request names its text and tokenizer by their hashes, and the file names the evaluator by its weights, so that an
    answer never belongs to another text or model.

    Args:
        identity: what tells the evaluator from every other, such as `evaluator_identity` returns.
    """

    def __init__(self, identity: str) -> None:
        self._path = cache_folder("longppl") / f"{sha256(identity.encode()).hexdigest()[:20]}.sqlite"
        self._waiting: dict[str, bytes] = {}

    def read(self, request: TokenLogprobsRequest) -> NDArray[np.float64] | None:
        """Returns a request's log-probabilities, float64 [scored], None where they are not kept."""
        found = self._waiting.get(_text(request))
        if found is None and self._path.is_file():
            with self._connection() as connection:
                row = connection.execute("SELECT logprobs FROM answers WHERE request = ?", (_text(request),)).fetchone()
            found = None if row is None else row[0]
        return None if found is None else np.frombuffer(found, np.float64)

    def keep(self, request: TokenLogprobsRequest, logprobs: NDArray[np.float64]) -> None:
        """Keeps a request's log-probabilities, float64 [scored]; on disk after some more of them, or `write`."""
        self._waiting[_text(request)] = logprobs.tobytes()
        if len(self._waiting) >= _ANSWERS_A_WRITE:
            self.write()

    def write(self) -> None:
        """Writes what is not yet on disk."""
        if not self._waiting:
            return
        with self._connection() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, logprobs BLOB)")
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", self._waiting.items())
        self._waiting.clear()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=_SECONDS_TO_WAIT)) as connection, connection:
                yield connection
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"Expected to keep a LongPPL evaluator's log-probabilities in {str(self._path)!r}, found that this "
                f"fails ({error}): set SBEVAL_CACHE to a folder with space that you may write to, or remove the file."
            ) from error


def evaluator_identity(evaluator: str) -> str:
    """Returns what tells an evaluator's weights from others: its files' sizes and times, or the hub's commit."""
    folder = Path(evaluator)
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.is_file())
        marks = [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
        return json.dumps([str(folder.resolve()), marks])
    from transformers import AutoConfig

    return json.dumps([evaluator, getattr(AutoConfig.from_pretrained(evaluator), "_commit_hash", None)])


def _text(request: TokenLogprobsRequest) -> str:
    return json.dumps(list(request))
