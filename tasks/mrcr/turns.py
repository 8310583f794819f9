"""Removes turns from the middle of a conversation, but none on which its right answer depends."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

from sbeval.tasks.mrcr.data import Conversation, Message


class Turns(NamedTuple):
    """A conversation as turns, some of which may be removed.

    A turn is a request with its reply. Requests that equal the one whose reply is the right answer are counted by the
    question ("the second poem"), so their turns stay. A conversation that does not contain the right answer keeps all
    turns.

    Attributes:
        opening: the messages before the second user message: instructions, examples or the first turn.
        turns: the other turns.
        removable: indices of the turns that may be removed, ascending.
        question: the last message.
    """

    opening: Sequence[Message]
    turns: Sequence[Sequence[Message]]
    removable: Sequence[int]
    question: Message

    @classmethod
    def of_conversation(cls, conversation: Conversation) -> Self:
        """Divides a conversation into its turns."""
        *messages, question = conversation.messages
        _, *starts = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]
        bounds = [*starts, len(messages)]
        turns = [messages[first:after] for first, after in itertools.pairwise(bounds)]
        reply = conversation.answer.removeprefix(conversation.code).strip()
        queried = {
            before["content"].strip()
            for before, message in itertools.pairwise(messages)
            if message["role"] == "assistant" and message["content"].strip() == reply
        }
        removable = [i for i, turn in enumerate(turns) if queried and turn[0]["content"].strip() not in queried]
        return cls(messages[: bounds[0]], turns, removable, question)

    def kept(self, count: int) -> list[Message]:
        """Returns the messages without the middle of the removable turns, of which `count` stay."""
        first, last = (count + 1) // 2, len(self.removable) - count // 2
        removed = set(self.removable[first:last])
        around = [message for i, turn in enumerate(self.turns) if i not in removed for message in turn]
        return [*self.opening, *around, self.question]
