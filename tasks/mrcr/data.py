"""Loads the conversations of MRCR from the hub or from a local copy in its layout."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sbeval.errors import UserError, brief
from sbeval.keeping.content import cached_by_content
from sbeval.tasks.recall.labelled import local_splits
from sbeval.tasks.ruler.texts import load_from_hub

HUB_DATASET = "openai/mrcr"
_COLUMNS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
_ROLES = ("system", "user", "assistant")
Message = Mapping[str, str]
"""A message with `role` and `content`, as chat templates take it."""


class Conversation(NamedTuple):
    """A conversation that ends with a request for an earlier reply.

    Attributes:
        messages: the messages; the last one is the request.
        answer: the right answer: the code, then the reply.
        code: the random string with which the answer has to begin.
    """

    messages: Sequence[Message]
    answer: str
    code: str


class Conversations(Sequence[Conversation]):
    """The conversations with one number of needles (equal requests); each is read from the table when it is used.

    Attributes:
        sha256: hash of all conversations.
        source: a local path or the dataset's id.
    """

    def __init__(self, table: Any, source: str) -> None:
        self._table = table
        self.source = source
        digest = hashlib.sha256()
        for row in table:
            parts = (row[name] for name in _COLUMNS[:3])
            digest.update("\x1e".join(map(str, parts)).encode("utf-8", "surrogatepass") + b"\x1d")
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        """Returns a conversation.

        Raises:
            UserError: its prompt is no list of messages that a user's message ends.
        """
        row = self._table[int(index)]
        prompt = row["prompt"]
        try:
            listed = json.loads(prompt) if isinstance(prompt, str) else prompt
            messages = [{"role": str(message["role"]), "content": str(message["content"])} for message in listed]
        except (ValueError, TypeError, KeyError):
            messages = []
        if not messages or messages[-1]["role"] != "user" or any(each["role"] not in _ROLES for each in messages):
            raise UserError(
                f"Expected the prompts in {self.source} as JSON lists of messages that end with the user's, found "
                f"{brief(prompt)}: name a copy of {HUB_DATASET}."
            )
        return Conversation(messages, str(row["answer"]), str(row["random_string_to_prepend"]))


@cached_by_content(3)
def load_conversations(path: str | None, needles: int) -> Conversations:
    """Loads the conversations with a number of needles.

    Args:
        path: a file or folder in the layout of the hub's dataset; None takes the hub's.
        needles: number of equal requests in a conversation.

    Raises:
        UserError: the data are missing, have another layout, or hold no such conversation.
    """
    table = (local_splits(path, "mrcr", "MRCR") if path else load_from_hub("mrcr", "PATH", HUB_DATASET))["train"]
    source = path or HUB_DATASET
    if lacking := [name for name in _COLUMNS if name not in table.column_names]:
        raise UserError(
            f"Expected the columns {', '.join(_COLUMNS)} in {source}, found none named {', '.join(lacking)}: name a "
            f"copy of {HUB_DATASET}."
        )
    chosen = [place for place, count in enumerate(table["n_needles"]) if count == needles]
    if not chosen:
        raise UserError(f"{source} holds no conversation with {needles} needles: run another task of sb_mrcr.")
    return Conversations(table.select(chosen), source)
