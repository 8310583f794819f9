"""MRCR's tasks: one for each number of needles; a conversation counts at the shortest context length that it fits."""

import copy
import dataclasses
import difflib
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from lm_eval.api.filter import Filter, FilterEnsemble
from lm_eval.api.instance import Instance
from numpy.typing import NDArray
from pydantic import Field

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord
from sbeval.scoring.requests import Answer
from sbeval.settings import PathText
from sbeval.tasks.draws import seeded_order
from sbeval.tasks.metadata import doublings
from sbeval.tasks.mrcr.data import Conversation, Message, load_conversations
from sbeval.tasks.mrcr.turns import Turns
from sbeval.tasks.ruler.drafts import Frame
from sbeval.tasks.ruler.options import RulerOptions, TooLong
from sbeval.tasks.ruler.task import RulerTask
from sbeval.tasks.tokens import cached_counts

log = logging.getLogger(__name__)

_COUNTED_TOGETHER = 16  # conversations, so that the longest need little memory
_NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
Render = Callable[[Sequence[Message]], Any]
"""Function that makes a prompt of messages; models behind servers take another type than text."""


class MrcrOptions(RulerOptions):
    """Options of MRCR."""

    title = "MRCR by length: sb_mrcr"
    fixed = frozenset({"needles"})
    refused = frozenset({"answer_prefix", "scripts"})
    default_lengths = doublings(8192, 1048576)

    too_long: TooLong = Field(
        default="leave_out",
        description='What becomes of a conversation that is longer than the longest length: "leave_out" leaves it out, '
        '"truncate" removes turns from its middle, but none with the queried request, and "refuse" refuses the run.',
    )
    needles: Literal[2, 4, 8] = Field(description="Equal requests in a conversation.")
    mrcr: PathText | None = Field(default=None, description="Local copy of openai/mrcr; None takes the hub's.")


class StrippedAnswer(Filter):  # type: ignore[misc]
    """Removes whitespace around generated answers, and nothing else: MRCR compares them character by character."""

    def apply(self, resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns, for every request, its first answer without whitespace around it."""
        return [Answer(answer.strip(), **getattr(answer, "facts", {})) for answer, *_ in resps]


class MrcrTask(RulerTask):
    """The n-th of several replies in OpenAI's conversations; 0 without the required beginning, else the similarity.

    A document is one conversation with one request. Documents of all lengths take turns, so `--limit N` selects about
    equally many at each length.
    """

    options_class = MrcrOptions
    family = "mrcr"
    options: MrcrOptions

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._filters = [FilterEnsemble(name="none", filters=[StrippedAnswer])]

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the conversations, and returns the data set's name, hash and source."""
        conversations = load_conversations(options.mrcr, options.needles)
        return "mrcr", conversations.sha256, conversations.source

    def record(self) -> TaskRecord:
        """Returns the facts about this run for the results file."""
        protocol = f"mrcr_{self.options.needles}_needles"
        return dataclasses.replace(super().record(), protocol=protocol, answer_prefix=None)

    def build_all_requests(self, **kwargs: Any) -> None:
        """Builds the requests of this rank's conversations, one for each.

        Raises:
            UserError: few-shot examples are requested, a conversation does not fit and `too_long` is "refuse", or a
                rank has no conversation of some length.
        """
        if self.config.num_fewshot:
            raise UserError(f"{self.config.task} has no further examples: run it without --num_fewshot.")
        chat_template = kwargs.get("chat_template") if kwargs.get("apply_chat_template") else None
        self._plan(_renderer(chat_template, kwargs.get("system_instruction")))
        selected = self.chosen_samples(kwargs)
        self._count_chosen(kwargs)
        rows = {int(doc["index"]): self._conversation_row(int(doc["index"])) for _, doc in selected}
        documents = self.keep_samples(selected, rows, self.sample_indices)
        settings = self.config.generation_kwargs
        if self.thinking_tokens is not None:
            settings = {**settings, "answer_prefix": "", "thinking_tokens": self.thinking_tokens}
        self._instances = [
            Instance(
                "generate_until",
                doc,
                (self._render(self.messages(int(doc["index"]))), copy.deepcopy(settings)),
                0,
                metadata=(self.config.task, number, 1),
            )
            for number, doc in documents
        ]

    def messages(self, index: int) -> Sequence[Message]:
        """Returns the messages of conversation `index`, without turns from its middle if these are removed."""
        return self._cut.get(index) or self.conversations[index].messages

    def answer_scores(self, answer: str, doc: Mapping[str, Any]) -> dict[str, float]:
        """Returns the score of one answer."""
        (right,) = doc["references"]
        return {"score": similarity(answer, right, doc["code"])}

    def _prepare(self, frame: Frame) -> None:
        """Plans the documents for prompts without chat template; `build_all_requests` may plan them again."""
        self.conversations = load_conversations(self.options.mrcr, self.options.needles)
        self._planned_for: tuple[str, int] | None = None
        self._plan(_renderer(None, None))

    def _plan(self, render: Render) -> None:
        """Counts the tokens of all conversations, and chooses those of each length.

        Raises:
            UserError: no conversation fits, or some does not and `too_long` is "refuse".
        """
        self._render = render
        if self._planned_for == (key := (_text(render(_PROBE)), self.generated_tokens)):
            return
        self._planned_for = key
        name = str(self.config.task)
        requested = self.requested_lengths
        self.tokens = self._needed(key[0])
        self._cut: dict[int, Sequence[Message]] = {}
        needed = self.tokens.copy()
        over = needed > requested[-1]
        if over.any() and self.options.too_long == "refuse":
            raise UserError(
                f"{name}: {over.sum()} of {len(needed)} conversations need more than {requested[-1]} tokens: set "
                "too_long to leave_out or truncate, or a longer context length."
            )
        if over.any() and self.options.too_long == "truncate":
            needed[over] = np.maximum(requested[-1], self._needed(key[0], cut=True)[over])
        # the shortest length that a conversation fits; behind the last one for those that fit none
        bins = np.searchsorted(requested, needed)
        order = seeded_order(len(needed), name, self.options.seed, "conversations")
        *by_length, self.left_out = (
            order[bins[order] == place][: self.options.num_samples] for place in range(len(requested) + 1)
        )
        known = getattr(self, "lengths", ())  # prompts with other text around them may give the same lengths again
        self.lengths = tuple(length for length, indices in zip(requested, by_length, strict=True) if len(indices))
        if not self.lengths:
            raise UserError(
                f"No conversation of {name} fits {requested[-1]} tokens; the shortest needs {needed.min()}: set a "
                "longer context length."
            )
        if self.lengths != known and (empty := [length for length in requested if length not in self.lengths]):
            log.warning("%s has no conversations for the context lengths %s", name, empty)
        self.length_of = {
            int(index): length for length, indices in zip(requested, by_length, strict=True) for index in indices
        }
        self.sample_indices = [
            int(index)
            for in_turn in itertools.zip_longest(*(indices.tolist() for indices in by_length))
            for index in in_turn
            if index is not None
        ]
        self.num_samples = len(self.sample_indices)
        self.keep_documents({"index": index} for index in self.sample_indices)
        self.keep_record(self.record(), self.counter.tokenizer)

    def _needed(self, probe: str, *, cut: bool = False) -> NDArray[np.int64]:
        """Returns the tokens of each prompt with its reserved answer, int64 [conversations]; cached on disk.

        With `cut`, prompts are without all turns that may be removed.
        """
        facts: list[object] = [self.conversations.sha256, self.counter.sha256, probe, self.counter.special_tokens]
        facts += [list(self.counter.dropped.suffix), *(["cut"] if cut else [])]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return cached_counts(digest, lambda: self._count_all(cut=cut)) + self.generated_tokens

    def _count_all(self, *, cut: bool) -> NDArray[np.int64]:
        counts = []
        for start in range(0, len(self.conversations), _COUNTED_TOGETHER):
            indices = range(start, min(start + _COUNTED_TOGETHER, len(self.conversations)))
            conversations: list[Conversation] = [self.conversations[i] for i in indices]
            listed = [Turns.of_conversation(each).kept(0) if cut else each.messages for each in conversations]
            counts.append(self.counter.count([self._text_of(messages) for messages in listed]))
        return np.concatenate(counts)

    def _text_of(self, messages: Sequence[Message]) -> str:
        return _text(self._render(messages))

    def _conversation_row(self, index: int) -> dict[str, Any]:
        conversation: Conversation = self.conversations[index]
        length = self.length_of[index]
        prompt_tokens = int(self.tokens[index]) - self.generated_tokens
        removed = 0
        if prompt_tokens + self.generated_tokens > length:
            self._cut[index] = self._shortened(conversation, length - self.generated_tokens)
            kept = int(self.counter.count([self._text_of(self._cut[index])])[0])
            prompt_tokens, removed = kept, prompt_tokens - kept
        return {
            "index": index,
            "lengths": [length],
            "references": [conversation.answer],
            "code": conversation.code,
            "messages": len(self.messages(index)),
            "prompt_tokens": [prompt_tokens],
            **({"cut_tokens": [removed]} if self.options.too_long == "truncate" else {}),
        }

    def _shortened(self, conversation: Conversation, budget: int) -> Sequence[Message]:
        """Removes turns from the middle until the prompt has at most `budget` tokens, which its other turns fit."""
        turns = Turns.of_conversation(conversation)
        low, high = 0, len(turns.removable)
        while high - low > 1:
            middle = (low + high) // 2
            fits = int(self.counter.count([self._text_of(turns.kept(middle))])[0]) <= budget
            low, high = (middle, high) if fits else (low, middle)
        return turns.kept(low)

    def _count_chosen(self, arguments: Mapping[str, Any]) -> None:
        """Records, for the chosen conversations of all ranks, how many there are at each length.

        Raises:
            UserError: a rank has no conversation of some length.
        """
        ranks = int(arguments.get("world_size", 1))
        chosen = [int(doc["index"]) for _, doc in self.chosen_samples({**arguments, "rank": 0, "world_size": 1})]
        by_length = {
            length: found for length in self.lengths if (found := [i for i in chosen if self.length_of[i] == length])
        }
        for length in by_length:
            if any(all(self.length_of[i] != length for i in chosen[rank::ranks]) for rank in range(ranks)):
                raise UserError(
                    f"{self.config.task}: some rank has no conversation for {length} tokens: use fewer processes or a "
                    "larger --limit."
                )
        facts: dict[str, Any] = {"lengths": list(by_length)}
        facts["fitting_samples"] = {str(length): len(indices) for length, indices in by_length.items()}
        facts["samples_sha256"] = {
            str(length): hashlib.sha256(",".join(map(str, sorted(indices))).encode()).hexdigest()
            for length, indices in by_length.items()
        }
        if self.options.too_long == "truncate":
            facts["cut_samples"] = {
                str(length): sum(self.tokens[i] > length for i in indices) for length, indices in by_length.items()
            }
        # those that fit no length are longer than the longest one
        left_out = self._considered_left_out(arguments, by_length)
        counts = {str(length): left_out * (length == max(by_length)) for length in by_length}
        facts["left_out_samples"] = counts if left_out or self.options.too_long == "leave_out" else None
        self.task_record = dataclasses.replace(self.task_record, **facts)

    def _considered_left_out(self, arguments: Mapping[str, Any], by_length: Mapping[int, Sequence[int]]) -> int:
        """Returns how many conversations were left out that would be among the chosen ones if they fitted.

        They take turns with those of each length, so a `--limit` considers as many as it selects at one length at most.
        Of single samples (`--samples`) none is left out.
        """
        if arguments.get("samples"):
            return 0
        is_limited = sum(map(len, by_length.values())) < len(self.sample_indices)
        most = max(map(len, by_length.values())) if is_limited else len(self.left_out)
        return min(most, len(self.left_out))


def similarity(answer: str, right: str, code: str) -> float:
    """Returns the similarity of two answers behind the code, 0 to 1; it is 0 if the answer does not begin with it.

    As in OpenAI's data set, it is `SequenceMatcher.ratio`: twice the number of matching characters, divided by the
    number of characters of both.
    """
    if not answer.startswith(code):
        return 0.0
    return difflib.SequenceMatcher(None, answer.removeprefix(code), right.removeprefix(code)).ratio()


def _renderer(chat_template: Callable[..., Any] | None, system: str | None) -> Render:
    """Returns a function that makes a prompt of messages: with a chat template, or as a dialogue without one."""
    before = [{"role": "system", "content": system}] if system else []

    def render(messages: Sequence[Message]) -> Any:
        listed = [dict(message) for message in [*before, *messages]]
        if chat_template is not None:
            return chat_template(listed, add_generation_prompt=True)
        lines = [f"{_NAMES[message['role']]}{message['content']}\n\n" for message in listed]
        return "".join([*lines, _NAMES["assistant"].rstrip()])

    return render


def _text(prompt: Any) -> str:
    """Returns a prompt as text; for a model behind a server it is JSON, whose tokens are an upper bound."""
    return prompt if isinstance(prompt, str) else str(getattr(prompt, "prompt", prompt))
