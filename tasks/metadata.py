"""The one reader of `--metadata`: which options a task has, and what the user chose.

lm-eval merges `--metadata` and `--model_args` into one mapping and hands it to every task, so a key that a task does
not know is left to the others, unless it is nearly one the task knows. `{"sb_wikitext_stream": {"stride": 512}}` sets
options for one task alone; there an unknown key is an error. A value of null counts as not given.
"""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import Field

from sbeval.checkpoints.facts import longest_input_tokens
from sbeval.errors import UserError
from sbeval.settings import Counted, Lengths, Name, Settings, Tokens, WholeNumber, unknown_key
from sbeval.tasks.lengths import Limit, SettledLengths, settle_lengths
from sbeval.tasks.packaged import PREFIX, definitions, is_group

# Numbers that are published were made with these: lm-eval's own seed of numpy for the perplexity tasks, and RULER's own
# for tasks whose samples are drawn. Another default would change every sample or interval.
PERPLEXITY_SEED = 1234
SAMPLES_SEED = 42

_LEAST_LIKENESS = 0.85
_NOT_IN_A_SAMPLE = {"num_samples", "seed", "max_length", "thinking_tokens", "vocabulary", "vocab_size"}
# what writing a text and counting its tokens takes: 300 to 380 bytes, measured at 2M tokens
_BYTES_A_TOKEN = 512


def doublings(first: int, last: int) -> tuple[int, ...]:
    """Returns context lengths from `first` to `last` tokens, each twice the one before."""
    return tuple(first << power for power in range((last // first).bit_length()))


class TaskOptions(Settings):
    """Options of every task here."""

    title: ClassVar[str] = "every sb_ task"
    """Heading of these options in the help."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields that the task's name decides, so that no option changes them."""
    default_lengths: ClassVar[tuple[int, ...]]
    """Context lengths in tokens where none are asked for, ascending."""

    context_lengths: Lengths | None = Field(
        default=None,
        description="Context lengths in tokens; None takes the task's own, as far as text and model reach.",
    )
    max_length: Tokens | None = Field(
        default=None,
        description="Longest input the model takes, in tokens: an argument of the model, which tasks read too.",
    )

    label: Name | None = Field(default=None, description="Name of the model in reports, in place of its checkpoint's.")

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task: what its YAML sets, what is set for all tasks, and its own entry on top.

        Raises:
            UserError: a value that cannot be, a key of the task's own entry that it does not know, a shared key that is
                nearly one it knows, or an entry for a task that does not exist.
        """
        known = cls.model_fields.keys() - cls.fixed
        entry = {} if metadata.get(task) is None else metadata[task]
        if not isinstance(entry, Mapping):
            raise UserError(
                f"Expected options of {task} as a mapping, found {entry!r}: write --metadata '{{\"{task}\": {{...}}}}'."
            )
        for key in entry:
            if key not in known:
                raise UserError(unknown_key(key, known, place=task, source="--metadata"))
        for key in metadata.keys() - {task} - known:
            _check_shared(str(key), task, known)
        chosen = {key: metadata[key] for key in known & metadata.keys()} | dict(entry)
        given = {key: value for key, value in chosen.items() if value is not None}
        return cls.read({**(definition or {}), **given}, place=task, source="--metadata")

    def lengths_of(self, task: str, pretrained: object, *, thinking_tokens: int | None = None) -> SettledLengths:
        """Returns the lengths to run, and the default ones the model is too short for beside its thinking.

        The model takes `max_length`, else what a local checkpoint's configuration names; a longer prompt would be cut
        on the left without a word in the results.

        Raises:
            UserError: they are longer than the model takes.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        because = f"a text takes {_BYTES_A_TOKEN} bytes a token to write and this machine has {memory >> 30} GiB"
        limits = [Limit(memory // _BYTES_A_TOKEN, because, "leave longer lengths out")]
        if (longest := self.max_length or longest_input_tokens(pretrained)) is not None:
            remedy = "raise max_length in --model_args, or leave longer lengths out"
            because = f"the model takes {longest} tokens"
            if thinking_tokens is not None:
                because += f" and thinks {thinking_tokens} of them, beside a context of prompt and answer"
                remedy = f"lower thinking_tokens, {remedy}"
            limits.append(Limit(max(0, longest - (thinking_tokens or 0)), because, remedy))
        return settle_lengths(task, self.context_lengths, self.default_lengths, hard=limits)


class SampleOptions(TaskOptions):
    """Options of tasks that draw their samples."""

    title = "tasks that draw samples: RULER, recall, copying"

    num_samples: Counted = Field(default=500, description="Samples at each length.")
    seed: WholeNumber = Field(default=SAMPLES_SEED, description="Seed of all draws.")

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task; of nothing can a sample hold more than it has tokens."""
        options = super().of_task(task, metadata, definition)
        longest = max(options.context_lengths or cls.default_lengths)
        for name in sorted(cls.model_fields.keys() - _NOT_IN_A_SAMPLE):
            if isinstance(value := getattr(options, name), int) and value > longest:
                raise UserError.expected(
                    f"{name} of {task} within {longest} tokens of context", found=value, remedy="lower it"
                )
        return options


def _check_shared(key: str, task: str, known: Iterable[str]) -> None:
    """Refuses a key for all tasks that is nearly an option of this one or a packaged task's name, or names a group."""
    if near := get_close_matches(key, known, n=1, cutoff=_LEAST_LIKENESS):
        raise UserError(f"{task}: expected {near[0]} in --metadata, found {key}: correct the name.")
    packaged = definitions()
    tasks = [name for name, settings in packaged.items() if not is_group(settings)]
    if not key.startswith(PREFIX) or key in tasks:
        return
    expected = "Expected options in --metadata under the name of a task, found"
    if key in packaged:
        raise UserError(f"{expected} the group {key}: give them to all tasks, or under the name of each.")
    if near := get_close_matches(key, tasks, n=3):
        raise UserError(f"{expected} {key}; did you mean {' or '.join(near)}?")
