"""The option classes that all tasks share, and the reader of `--metadata`.

lm-eval merges `--metadata` and `--model_args` into one mapping and passes it to every task. A task therefore ignores
keys that it does not know, unless a key looks like a misspelt option of the task. An entry under a task's name, such as
`{"sb_wikitext_stream": {"stride": 512}}`, sets options of that task only; in such an entry an unknown key is an error.
A value of null counts as not set.
"""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import Field

from sbeval.checkpoints.facts import longest_input_tokens
from sbeval.errors import UserError
from sbeval.settings import Counted, Lengths, Name, Settings, Tokens, WholeNumber, unknown_key
from sbeval.task_metadata import settings_source
from sbeval.tasks.lengths import Limit, SettledLengths, settle_lengths
from sbeval.tasks.packaged import PREFIX, definitions, is_group

# Published numbers use these seeds: lm-eval's numpy seed for the perplexity tasks, and RULER's seed for tasks that draw
# samples. Another default would change every sample or interval.
PERPLEXITY_SEED = 1234
SAMPLES_SEED = 42

_LEAST_LIKENESS = 0.85
_NOT_IN_A_SAMPLE = {"num_samples", "seed", "max_length", "thinking_tokens", "vocabulary", "vocab_size"}
# memory to build a text and count its tokens: 300 to 380 bytes a token, measured at 2M tokens
_BYTES_A_TOKEN = 512


def doublings(first: int, last: int) -> tuple[int, ...]:
    """Returns the context lengths from `first` to `last` tokens, each twice the previous one."""
    return tuple(first << power for power in range((last // first).bit_length()))


class TaskOptions(Settings):
    """Options of every packaged task."""

    title: ClassVar[str] = "every sb_ task"
    """Heading of these options in `--help`."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Fields that a task's YAML sets and that no user option may change."""
    default_lengths: ClassVar[tuple[int, ...]]
    """Context lengths in tokens that are scored if the user sets none, ascending."""

    context_lengths: Lengths | None = Field(
        default=None,
        description="Context lengths in tokens; None takes the task's defaults that text and model allow.",
    )
    max_length: Tokens | None = Field(
        default=None,
        description="Longest input of the model in tokens: an argument of the model that tasks read too.",
    )

    label: Name | None = Field(default=None, description="Name of the model in reports, instead of the checkpoint's.")

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task.

        Settings of the task's YAML (`definition`) come first, then the user's settings for all tasks, then the user's
        entry under the task's name; later ones override earlier ones.

        Raises:
            UserError: a value is impossible, the task's entry holds an unknown key, a key for all tasks looks like a
                misspelt option of this one, or there is an entry for a task that does not exist.
        """
        known = cls.model_fields.keys() - cls.fixed
        entry = {} if metadata.get(task) is None else metadata[task]
        if not isinstance(entry, Mapping):
            raise UserError(
                f"Expected the options of {task} as a mapping, found {entry!r}: write "
                f"--metadata '{{\"{task}\": {{...}}}}'."
            )
        for key in entry:
            if key not in known:
                raise UserError(unknown_key(key, known, place=task, source=settings_source()))
        cls.check_shared_keys(metadata.keys() - {task}, task=task, source=settings_source())
        chosen = {key: metadata[key] for key in known & metadata.keys()} | dict(entry)
        user_values = {key: value for key, value in chosen.items() if value is not None}
        return cls.read({**(definition or {}), **user_values}, place=task, source=settings_source())

    @classmethod
    def check_shared_keys(cls, keys: Iterable[str], *, task: str, source: str) -> None:
        """Refuses keys for all tasks that look like a misspelt option of one task or like a misspelt task.

        `task` is the name of the one task, and `source` the option in which the user wrote the keys, for messages.

        Raises:
            UserError: there is such a key; the message names it and the likely spelling.
        """
        known = cls.model_fields.keys() - cls.fixed
        for key in keys:
            if key not in known:
                _check_shared(str(key), task, known, source)

    def lengths_of(
        self, task: str, pretrained: object, *, thinking_tokens: int | None = None, leave_out: bool = False
    ) -> SettledLengths:
        """Returns the context lengths to run, and the default lengths that are too long for the model or the machine.

        The longest input of the model is the model argument `max_length` or, if that is not set, the context length in
        a local checkpoint's configuration. lm-eval would truncate a longer prompt on the left, and no result would
        show that.

        Args:
            task: its name, for errors.
            pretrained: the model's checkpoint, from its arguments.
            thinking_tokens: tokens of the longest input that are reserved for thinking; None reserves none.
            leave_out: whether requested lengths that are too long are left out, as default lengths are.

        Raises:
            UserError: a requested length is too long for the model or for this machine's memory.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        because = (
            f"building a text needs {_BYTES_A_TOKEN} bytes of memory a token and this machine has {memory >> 30} GiB"
        )
        limits = [Limit(memory // _BYTES_A_TOKEN, because, "leave longer lengths out")]
        if (longest := self.max_length or longest_input_tokens(pretrained)) is not None:
            remedy = "raise max_length in --model_args, or leave longer lengths out"
            because = f"the model's longest input is {longest} tokens"
            if thinking_tokens is not None:
                because += f", {thinking_tokens} of which are reserved for thinking"
                remedy = f"lower thinking_tokens, {remedy}"
            limits.append(Limit(max(0, longest - (thinking_tokens or 0)), because, remedy))
        return settle_lengths(task, self.context_lengths, self.default_lengths, hard=limits, leave_out=leave_out)


class SampleOptions(TaskOptions):
    """Options of tasks that generate their samples at random from a seed."""

    title = "tasks that draw samples: RULER, recall, copying"

    num_samples: Counted = Field(default=500, description="Samples at each length.")
    seed: WholeNumber = Field(default=SAMPLES_SEED, description="Seed of all draws.")

    @classmethod
    def of_task(cls, task: str, metadata: Mapping[str, Any], definition: Mapping[str, Any] | None = None) -> Self:
        """Reads the options of one task; refuses a number, such as of needles, above the longest context length.

        Raises:
            UserError: as in `TaskOptions.of_task`, or such a number exceeds the longest context length in tokens.
        """
        options = super().of_task(task, metadata, definition)
        longest = max(options.context_lengths or cls.default_lengths)
        for name in sorted(cls.model_fields.keys() - _NOT_IN_A_SAMPLE):
            if isinstance(value := getattr(options, name), int) and value > longest:
                raise UserError.expected(
                    f"{name} of {task} to be at most its longest context length, {longest} tokens",
                    found=value,
                    remedy="lower it",
                )
        return options


def _check_shared(key: str, task: str, known: Iterable[str], source: str) -> None:
    """Refuses a metadata key outside any task's entry that looks like a misspelt option or task name, or is a group.

    Raises:
        UserError: the key is such a key; the message names it and the likely spelling.
    """
    if near := get_close_matches(key, known, n=1, cutoff=_LEAST_LIKENESS):
        raise UserError(f"{task}: expected {near[0]} in {source}, found {key}: correct the name.")
    packaged = definitions()
    tasks = [name for name, settings in packaged.items() if not is_group(settings)]
    if not key.startswith(PREFIX) or key in tasks:
        return
    expected = f"Expected the name of a task as a key of {source}, found"
    if key in packaged:
        raise UserError(f"{expected} the group {key}: set the options for all tasks, or under the name of each.")
    if near := get_close_matches(key, tasks, n=3):
        raise UserError(f"{expected} {key}; did you mean {' or '.join(near)}?")
