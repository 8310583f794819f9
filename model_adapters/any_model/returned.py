"""Whether a server or an engine read the tokens that it was sent, and scored all of them.

lm-eval adds up whatever comes back, so a prompt that was cut, a BOS that was added or left out, or a list that is too
short would be a wrong number. It is counted here, where lm-eval reads an answer.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sbeval.errors import UserError

_READERS = ("parse_logprobs", "_parse_logprobs")  # of servers, and of engines in this process


class _Returned(NamedTuple):
    """What came back for one prompt.

    Attributes:
        scored: number of the prompt's tokens that came back with a log-probability, the first counted too.
        read: number of tokens read, None where that is not told.
        first: the first token as it was read, None where that is not told.
    """

    scored: int
    read: int | None
    first: Any


@contextlib.contextmanager
def whole_answers(lm: Any, name: str) -> Iterator[None]:
    """Within it, an answer to other tokens than were sent, or to some of them, is an error.

    Raises:
        UserError: naming what was added or is missing.
    """
    readers = {reader: getattr(lm, reader) for reader in _READERS if hasattr(lm, reader)}
    for reader, read in readers.items():

        def read_whole(*, outputs: Any, tokens: Any, _read: Any = read, **rest: Any) -> Any:
            sent = tokens if tokens and isinstance(tokens[0], list) else [tokens]
            _check(lm, name, sent, outputs)
            return _read(outputs=outputs, tokens=tokens, **rest)

        setattr(lm, reader, read_whole)
    try:
        yield
    finally:
        for reader in readers:
            delattr(lm, reader)


def _check(lm: Any, name: str, sent: Sequence[Sequence[int]], outputs: Any) -> None:
    if (returned := _returned(outputs)) is None:
        return
    if len(returned) != len(sent):
        raise UserError(f"Expected {len(sent)} answers from {name} to as many prompts, found {len(returned)}.")
    for tokens, found in zip(sent, returned, strict=True):
        count, begins_with_bos = len(tokens), tokens[0] == getattr(lm, "prefix_token_id", None)
        read = found.scored if found.read is None else found.read
        if read == count + 1:
            reason = f"that it puts a token of its own before them, {found.first!r}: have it add no special tokens"
        elif read == count - 1 and begins_with_bos:
            reason = f"that it leaves the first out, BOS ({tokens[0]}): have it take prompts as they are"
        elif read > count:
            reason = f"that it read {read}: send it tokens, no text (tokenized_requests=True)"
        elif read < count:
            reason = f"that it read {read}, since it cuts prompts: start it with room for longer ones"
        elif found.scored < count:
            reason = f"log-probabilities of {found.scored}: use a server that gives all of them (echo)"
        else:
            continue
        raise UserError(f"Expected {name} to read and score the {count} tokens of a prompt, found {reason}.")


def _returned(outputs: Any) -> list[_Returned] | None:
    """Reads what a completions server, SGLang, or an engine such as vLLM returned for some prompts; None for others."""
    several = outputs if isinstance(outputs, list) else [outputs]
    if all(isinstance(output, dict) and "choices" in output for output in several):
        choices = [choice for output in several for choice in output["choices"]]
        # with several prompts a server tells their sum; its last token is one that it generated
        read = several[0].get("usage", {}).get("prompt_tokens") if len(choices) == 1 else None
        lists = [choice.get("logprobs") or {} for choice in sorted(choices, key=lambda choice: choice["index"])]
        return [_counted((of.get("token_logprobs") or [])[:-1], read, of.get("tokens")) for of in lists]
    if all(isinstance(output, dict) and "meta_info" in output for output in several):
        told = [output["meta_info"] for output in several]
        scored = [list(zip(*of["input_token_logprobs"], strict=True)) or [(), ()] for of in told]
        return [_counted(of[0], x.get("prompt_tokens"), of[1]) for of, x in zip(scored, told, strict=True)]
    if all(hasattr(output, "prompt_logprobs") for output in several):
        read_by = [getattr(output, "prompt_token_ids", None) for output in several]
        lists = [output.prompt_logprobs or [] for output in several]
        return [_counted(of, ids and len(ids), ids) for of, ids in zip(lists, read_by, strict=True)]
    return None


def _counted(logprobs: Sequence[Any], read: int | None, tokens: Sequence[Any] | None) -> _Returned:
    scored = min(1, len(logprobs)) + sum(value is not None for value in logprobs[1:])
    return _Returned(scored, read, tokens[0] if tokens else "of unknown text")
