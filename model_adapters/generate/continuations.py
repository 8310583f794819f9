"""Turns prompts into generated tokens: in slots if model and setting allow it, else by transformers' `generate`."""

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence

from sbeval.model_adapters.generate.batches import generate_in_batches
from sbeval.model_adapters.generate.context_parallel import prompts_together
from sbeval.model_adapters.generate.slots.schedule import Continuations
from sbeval.model_adapters.generate.slots.served import GenerationInSlots
from sbeval.model_adapters.generate.slots.stepper import ReadPrompt
from sbeval.model_adapters.session import Session
from sbeval.model_adapters.truncation import Prompt


def continuations(session: Session, groups: Sequence[Sequence[Prompt]]) -> Continuations:
    """Continues prompts, and yields each prompt's index and new tokens as soon as they are complete.

    Each list in `groups` holds prompts with the same generation setting.

    Raises:
        UserError: every way to generate with this model has failed the self-test.
    """
    slots = GenerationInSlots(session)
    if any(group and not slots.serves(group[0].setting) for group in groups):
        session.self_test.check("generation")  # checked first, so that it does not fail after hours of generation

    def continued(prompts: Sequence[Prompt], read: ReadPrompt | None = None) -> Continuations:
        if not slots.serves(prompts[0].setting):
            yield from generate_in_batches(session, prompts, read)
            return
        answered = yield from slots.generate(prompts, read)
        by_setting: dict[str, list[Prompt]] = defaultdict(list)
        for prompt in prompts:
            if prompt.index not in answered:  # slots gave a wrong answer and stopped; `generate` answers the rest
                by_setting[setting_name(prompt)].append(prompt)
        for same_setting in by_setting.values():
            session.self_test.check("generation")
            yield from generate_in_batches(session, same_setting, read)

    together: set[int] = set()
    for prompt, read in prompts_together(session, [*itertools.chain(*groups)]):
        together.add(prompt.index)
        yield from continued([prompt], read)
    left = [rest for group in groups if (rest := [prompt for prompt in group if prompt.index not in together])]
    in_slots = [group for group in left if slots.serves(group[0].setting)]
    in_batches = [group for group in left if not slots.serves(group[0].setting)]
    for group in ([*itertools.chain(*in_slots)], *in_batches):
        if group:
            yield from continued(group)


def setting_name(prompt: Prompt) -> str:
    """Returns a key for a prompt's generation setting: prompts with equal settings have equal keys."""
    return json.dumps(prompt.setting, sort_keys=True, default=str)
