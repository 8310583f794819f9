"""Turns prompts into the texts of answers; a reasoning model first generates its thinking, then the answer."""

import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Generator, Sequence

import numpy as np

from sbeval.model_adapters.answers import mapped
from sbeval.model_adapters.generate.continuations import continuations, setting_name
from sbeval.model_adapters.generate.slots.schedule import Continuations
from sbeval.model_adapters.generate.texts import Continuation, answer_text, has_end, no_text, stop_texts
from sbeval.model_adapters.generate.thinking import Thinking, Thought
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Prompt
from sbeval.scoring.non_finite import NoText
from sbeval.scoring.requests import Answer

_THOUGHTS_KEPT = 64
"""If there is a response cache, the thinking of this many prompts is generated before their answers are.

The cache only stores complete answers, so an interrupt loses the thinking of at most this many prompts.
"""


def answers_of(session: Session, prompts: Sequence[Prompt]) -> Generator[tuple[int, Answer | NoText], None, None]:
    """Yields the index of each prompt with its answer, in any order. Equal greedy prompts are answered once.

    If logits were NaN or infinite before an answer was complete, a `NoText` is yielded in its place.
    """
    groups = _same_answers(prompts)
    equal_to = {equal[0].index: equal for group in groups for equal in group}
    thoughts: dict[int, Thought] = {}

    def answer(result: tuple[int, Continuation]) -> list[tuple[int, Answer | NoText]]:
        index, continuation = result
        prompt, thought = prompts[index], thoughts.get(index)
        session.meter.add(len(prompt.tokens))
        text = _text(session, prompt, continuation)
        facts = {} if thought is None else {f"thinking_{name}": value for name, value in thought._asdict().items()}
        if not isinstance(text, NoText) and _is_cut(session, prompt, continuation):
            facts["answer_cut"] = True
        answered = []
        for equal in equal_to[index]:
            copied = copy.copy(text)
            copied.facts = {"cut_tokens": equal.cut_tokens, **facts}
            answered.append((equal.index, copied))
        return answered

    firsts = [[equal[0] for equal in group] for group in groups]
    if session.thinking is None:
        yield from mapped(continuations(session, firsts), answer)
    else:
        yield from mapped(_after_thinking(session, session.thinking, firsts, thoughts), answer)


def _text(session: Session, prompt: Prompt, continuation: Continuation) -> Answer | NoText:
    opened, tokens = session.opened, continuation.tokens
    if not continuation.sound:
        return no_text(len(prompt.tokens), len(tokens))
    stop = stop_texts(opened.tokenizer, prompt.setting["until"])
    return Answer(answer_text(opened.tokenizer, tokens, stop, opened.think_end_token))


def _is_cut(session: Session, prompt: Prompt, continuation: Continuation) -> bool:
    """Whether an answer used up its token budget without an end token or a stop sequence."""
    stop = stop_texts(session.opened.tokenizer, prompt.setting["until"])
    tokens = continuation.tokens
    return len(tokens) >= prompt.setting["max_gen_toks"] and not has_end(session.opened, tokens, stop)


def _after_thinking(
    session: Session, thinking: Thinking, groups: Sequence[Sequence[Prompt]], thoughts: dict[int, Thought]
) -> Continuations:
    """Generates the thinking for each prompt, stores facts about it in `thoughts`, and yields the answers after it."""
    chunks: list[Sequence[Sequence[Prompt]]] = [groups]
    if session.cache_hook.dbdict is not None:  # see `_THOUGHTS_KEPT`
        chunks = [[group[i : i + _THOUGHTS_KEPT]] for group in groups for i in range(0, len(group), _THOUGHTS_KEPT)]
    for chunk in chunks:
        prompts = {prompt.index: prompt for prompt in itertools.chain(*chunk)}
        before = [[dataclasses.replace(p, setting=thinking.setting(p.setting)) for p in group] for group in chunk]
        ready: dict[int, Prompt] = {}
        for index, written in continuations(session, before):
            prompt = prompts[index]
            if not written.sound:
                yield index, written
                continue
            session.meter.add(len(prompt.tokens))
            thoughts[index], tokens = thinking.ended(written.tokens, prompt.beginning, prompt.setting["until"])
            ready[index] = dataclasses.replace(prompt, tokens=np.concatenate([prompt.tokens, np.array(tokens)]))
        yield from continuations(session, [[ready[p.index] for p in group if p.index in ready] for group in chunk])


def _same_answers(prompts: Sequence[Prompt]) -> list[list[list[Prompt]]]:
    """Returns, for each generation setting, its prompts in lists; the prompts of one list get the same answer.

    Equal prompts have equal greedy continuations. Sampled continuations are drawn separately for each prompt.
    """
    groups: dict[str, dict[object, list[Prompt]]] = defaultdict(lambda: defaultdict(list))
    for prompt in prompts:
        once = prompt.index if prompt.setting.get("do_sample") else (prompt.tokens.tobytes(), prompt.beginning)
        groups[setting_name(prompt)][once].append(prompt)
    return [[*group.values()] for group in groups.values()]
