"""Cuts prompts and contexts that do not fit into `max_length` on the left, or refuses them."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.model_adapters.session import Session

logger = logging.getLogger(__name__)
OWN_TASKS = "sb_"
_OF_THINKING = ("answer_prefix", "thinking_tokens")
Names = Sequence[str | None]
Pairs = Sequence[tuple[list[int], list[int]]]
"""Pairs of the tokens of a context and the tokens of its continuation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to continue, with the index of its request and its generation settings from `normalize_gen_kwargs`.

    Attributes:
        tokens: int64 [P], the tokens of the prompt that were not cut.
        cut_tokens: the number of tokens that were cut on the left.
        beginning: text with which the answer begins, put after the model's thinking; "" without such a text.
    """

    index: int
    tokens: NDArray[np.int64]
    setting: Mapping[str, Any]
    cut_tokens: int
    beginning: str = ""

    @property
    def length_tokens(self) -> int:
        """The largest number of tokens of the prompt with its answer."""
        return len(self.tokens) + int(self.setting["max_gen_toks"])


class Context(NamedTuple):
    """The model inputs that score a continuation, and the number of tokens that were cut on the left.

    The inputs are the tokens of context and continuation but the last.
    """

    inputs: tuple[int, ...]
    cut_tokens: int


def fit_prompts(
    session: Session,
    prompts: Sequence[list[int]],
    settings: Sequence[Mapping[str, Any]],
    task_names: Names,
) -> list[Prompt]:
    """Cuts prompts on the left so that prompt, thinking and generation budget fit into `max_length`.

    The entry `answer_prefix` of a setting is text with which the answer begins after the model's thinking.

    Raises:
        UserError: a prompt is too long, and belongs to one of this project's tasks or `truncation` is "error"; a
            generation budget is below one token or leaves no room for a prompt; or a task was built for another number
            of `thinking_tokens`.
    """
    budgets = [setting["max_gen_toks"] for setting in settings]
    if min(budgets, default=1) < 1:
        raise UserError(f"Expected max_gen_toks of at least one token, found {min(budgets)}: check the task.")
    thinking_tokens = session.thinking and session.thinking.tokens
    if unequal := {setting.get("thinking_tokens", thinking_tokens) for setting in settings} - {thinking_tokens}:
        raise UserError(
            f"The tasks' metadata has thinking_tokens={max(unequal)}, but the model has {thinking_tokens}: set it in "
            "--model_args only, where tasks read it too."
        )
    beginnings = [""] * len(prompts)
    if session.thinking is not None:
        beginnings = [str(setting.get("answer_prefix", "")) for setting in settings]
        settings = [{key: setting[key] for key in setting if key not in _OF_THINKING} for setting in settings]
        budgets = [n + session.thinking.room(prefix) for n, prefix in zip(budgets, beginnings, strict=True)]
    needed = [len(tokens) + budget for tokens, budget in zip(prompts, budgets, strict=True)]
    thinking = f", thinking_tokens={session.thinking.tokens}" if session.thinking else ""
    cuts = _cuts(session, f"prompts{thinking} and the tokens to generate", needed, task_names)
    session.check_positions(max((length - cut for length, cut in zip(needed, cuts, strict=True)), default=0))
    budget = max((budget for budget, cut in zip(budgets, cuts, strict=True) if cut), default=0)
    if budget >= session.max_length:
        expected = f"Expected max_gen_toks{thinking} to be less than max_length={session.max_length}"
        remedy = "lower it with --gen_kwargs max_gen_toks=..., or raise max_length in --model_args"
        raise UserError(f"{expected}, found {budget}: {remedy}.")
    _warn(session, "prompts", cuts)
    return [
        Prompt(index, np.asarray(tokens[cut:], dtype=np.int64), setting, cut, beginning)
        for index, (tokens, setting, cut, beginning) in enumerate(zip(prompts, settings, cuts, beginnings, strict=True))
    ]


def fit_contexts(session: Session, pairs: Pairs, task_names: Names) -> list[Context]:
    """Cuts contexts on the left so that the inputs of each context with its continuation fit into `max_length`.

    Raises:
        UserError: as in `fit_prompts`; or a continuation is empty or longer than `max_length`.
    """
    longest = max((len(continuation) for _, continuation in pairs), default=1)
    if any(not continuation for _, continuation in pairs):
        raise UserError("Expected continuations of at least one token, found an empty one: check the task.")
    if longest > session.max_length:
        expected = f"Expected continuations of at most max_length={session.max_length} tokens"
        raise UserError(f"{expected}, found one of {longest}: raise max_length in --model_args.")
    needed = [len(context) + len(continuation) - 1 for context, continuation in pairs]
    cuts = _cuts(session, "contexts and continuations", needed, task_names)
    _warn(session, "contexts", cuts)
    return [
        Context(tuple((context + continuation)[cut:-1]), cut)
        for (context, continuation), cut in zip(pairs, cuts, strict=True)
    ]


def record_facts(instance: Any, **facts: Any) -> None:
    """Adds facts about an answer, such as `cut_tokens`, to the request's arguments, which lm-eval logs with the sample.

    Facts that are 0 or None are left out. A request that already has facts keeps them.
    """
    known = {name: fact for name, fact in facts.items() if fact not in (0, None) or isinstance(fact, bool)}
    if known and not isinstance(instance.arguments[-1], Facts):
        instance.arguments = (*instance.arguments, Facts(known))


class Facts(dict[str, Any]):
    """Facts about an answer, which `record_facts` adds as the last of a request's arguments."""


def _cuts(session: Session, what: str, needed: Sequence[int], task_names: Names) -> list[int]:
    cuts = [max(0, length - session.max_length) for length in needed]
    ours = [(name or "").startswith(OWN_TASKS) for name in task_names]
    refuses_all = session.opened.options.truncation == "error"
    refused = [index for index, cut in enumerate(cuts) if cut and (refuses_all or ours[index])]
    if refused:
        names = ", ".join(sorted({task_names[index] or "a task without a name" for index in refused}))
        expected = f"Expected the {what} of {names} to fit into max_length={session.max_length}"
        remedy = f"pass max_length={max(needed[index] for index in refused)} in --model_args"
        raise UserError(f"{expected}, found {len(refused)} of {len(needed)} longer: {remedy}.")
    return cuts


def _warn(session: Session, what: str, cuts: Sequence[int]) -> None:
    if cut := [tokens for tokens in cuts if tokens]:
        logger.warning(
            "%d of %d %s were cut on the left by up to %d tokens to fit into max_length=%d (truncation=error refuses "
            "this)",
            *(len(cut), len(cuts), what, max(cut), session.max_length),
        )
