"""The whole prompt: a sample, and what system text and chat template put around it."""

import dataclasses
from collections.abc import Callable

from sbeval.errors import UserError
from sbeval.tasks.ruler.drafts import Draft

PROMPT_MARK, PREFIX_MARK = "\ue000prompt\ue000", "\ue000prefix\ue000"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What stands around a prompt: system text and chat template, or only the space before the answer prefix.

    Attributes:
        head: before the prompt.
        middle: between the question and the answer prefix.
        tail: after the answer prefix.
    """

    head: str = ""
    middle: str = " "
    tail: str = ""


def prompt_text(draft: Draft, units: int, frame: Frame) -> str:
    """Returns the whole prompt."""
    return "".join(
        [frame.head, *draft.opening, draft.body(units), draft.closing, frame.middle, draft.answer_prefix, frame.tail]
    )


def rendered_frame(render: Callable[[str], str]) -> Frame:
    """Returns what a template puts around a prompt, by rendering marks in its place and cutting there.

    Args:
        render: from the start of an answer to the text of a message that is `PROMPT_MARK` and that start.

    Raises:
        UserError: the template does not show each of them once.
    """
    text = render(PREFIX_MARK)
    if text.count(PROMPT_MARK) != 1 or text.count(PREFIX_MARK) != 1:
        raise UserError(
            "Expected the chat template to show the user's message and the start of the answer once each, found "
            f"{text.count(PROMPT_MARK)} and {text.count(PREFIX_MARK)}; run without --apply_chat_template."
        )
    head, rest = text.split(PROMPT_MARK)
    middle, tail = rest.split(PREFIX_MARK)
    return Frame(head=head, middle=middle, tail=tail)
