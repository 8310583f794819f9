"""Checks of the prompt log-probabilities and generated texts that a server or an engine returns.

lm-eval adds up whatever comes back. A shifted list, an answer to another prompt or a log-probability above zero would
give a wrong number without an error. So `check_scores` checks every answer before lm-eval reads it:

- A response body holds as many choices as prompts were sent, and each index once.
- A choice has one entry for each token of its prompt. Only the first token has no log-probability, since nothing
  precedes it.
- A log-probability is finite and not above zero, except for rounding. Not all of them are exactly zero.
- The most probable alternative is at least as probable as the token. Two values for one token are equal.
- Tokens or texts that the server echoes are those of the prompt.

`check_echo` does the same for a prompt that was sent as text, and `check_texts` for generated texts. Three formats are
known: OpenAI's completions API, SGLang's own API, and the outputs of vLLM in this process. An answer in another format
is not checked.
"""

import functools
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from sbeval.errors import UserError, brief

ROUNDING_NATS = 0.01
"""How far a log-probability may exceed 0, in nats, because of rounding."""
LEAST_NATS = -9900.0
"""This log-probability and lower ones stand for minus infinity: OpenAI's API and vLLM write -9999, in bf16 -9984."""
_LEAST_ZEROS = 4
ECHO_REMEDY = "use a server that scores prompts with echo=True, as vLLM does and llama.cpp does not"
"""What to do about a server that returns no log-probabilities of prompts."""
_SAME_NATS = 1e-4  # a server may round log-probabilities of alternatives and of the prompt differently
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_SPACES = " \t\r\n▁ĠĊ"
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_BYTES = re.compile(r"bytes:|<0x[\dA-F]{2}>")


class WrongAnswerError(UserError):
    """A server's answer that cannot be right. `prompt` holds the tokens of its prompt, or None."""

    def __init__(self, message: str, prompt: Sequence[int] | None = None) -> None:
        super().__init__(message)
        self.prompt = None if prompt is None else [*prompt]


class OtherPromptError(WrongAnswerError):
    """An answer whose echoed tokens differ from those of its prompt."""


class PromptBatch(NamedTuple):
    """The prompts of one call, and the server or engine that scores them.

    Attributes:
        backend: lm-eval's name of the model, with the address of a server.
        prompts: the tokens of each prompt.
        scored_from: for each prompt, the index of the first token whose log-probability lm-eval sums.
        tokenizer: the prompts' tokenizer, or None.
        bos: the BOS token that lm-eval puts before a text, or None.
        of_completions: whether lm-eval can parse only OpenAI's completions format.
    """

    backend: str
    prompts: Sequence[Sequence[int]]
    scored_from: Sequence[int]
    tokenizer: Any = None
    bos: int | None = None
    of_completions: bool = False


class _Answer(NamedTuple):
    """The answer to one prompt, in one format for all servers; each list has an entry for each token of the prompt.

    Attributes:
        logprobs: log-probability of each token, None for the first.
        best: for each token, log-probabilities of the most probable tokens, by token; None for the first.
        tokens: ids or texts of the tokens, None if the server does not return them.
        text: the prompt's text followed by the generated text, if the server returns it.
        read: the number of prompt tokens that the server reports, None if it reports none.
    """

    logprobs: Sequence[Any]
    best: Sequence[Any] | None
    tokens: Sequence[Any] | None
    text: Any
    read: int | None


def check_scores(outputs: Any, batch: PromptBatch) -> None:
    """Checks the log-probabilities that a server or engine returned, as the module's docstring lists.

    Raises:
        WrongAnswerError: an answer cannot be right. The message says why and what to change.
    """
    answers = _answers(outputs, batch)
    if answers is None:
        return
    for answer, prompt, scored_from in zip(answers, batch.prompts, batch.scored_from, strict=True):
        if reason := _miscounted(answer, prompt, batch):
            message = f"Expected {batch.backend} to score the {len(prompt)} tokens of a prompt, found {reason}"
            raise WrongAnswerError(message, prompt)
        expectation = (
            f"Expected {batch.backend} to return the log-probabilities of the {len(prompt)} tokens of a prompt"
        )
        if reason := _echo_difference(answer, prompt, batch.tokenizer):
            raise OtherPromptError(f"{expectation}, found {reason}", prompt)
        if reason := _impossible(answer, scored_from, batch.tokenizer):
            raise WrongAnswerError(f"{expectation}, found {reason}", prompt)


def check_echo(output: Any, prompt: str, scored_from: int, backend: str) -> None:
    """Checks the log-probabilities of a prompt that was sent as text, as lm-eval's model `gguf` sends it.

    There is no tokenizer: whether the server read the whole text follows from the tokens' offsets (`text_offset`).

    Args:
        output: body of the server's answer.
        prompt: the text with its continuation.
        scored_from: number of characters before the continuation.
        backend: lm-eval's name of the model, with the address of a server.

    Raises:
        WrongAnswerError: the answer cannot be right. The message says why and what to change.
    """
    batch = PromptBatch(backend, [[]], [0], of_completions=True)
    expectation = f"Expected {backend} to return the log-probabilities of the tokens of a prompt"
    choices = _choices(output, backend, 1)
    record = None if choices is None else choices[0].get("logprobs")
    if choices is None or not isinstance(record, Mapping):
        raise WrongAnswerError(f"{expectation}, found {brief(output)}: {ECHO_REMEDY}")
    columns = [record.get(name) for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs")]
    if not all(isinstance(column, list) and len(column) == len(columns[0] or ()) > 2 for column in columns):
        raise WrongAnswerError(f"{expectation}, found {brief(record)}: {ECHO_REMEDY}")
    offsets = columns[0] or []
    if not all(_is_number(offset) for offset in offsets) or offsets != sorted(offsets):
        raise WrongAnswerError(f"{expectation}, found offsets (text_offset) that do not increase ({brief(offsets)})")
    if offsets[-1] < len(prompt):
        raise WrongAnswerError(
            f"{expectation}, found those of {offsets[-1]} of its {len(prompt)} characters: start the server with a "
            "longer maximum length"
        )
    first = next(index for index, offset in enumerate(offsets) if offset >= min(scored_from, offsets[-1]))
    if reason := _impossible(_of_completions(choices[0], None, batch), first, None):
        raise WrongAnswerError(f"{expectation}, found {reason}")


def check_texts(outputs: Any, prompts: int | None, backend: str) -> None:
    """Checks that response bodies of OpenAI's API hold one generated text for each prompt.

    A choice whose text is None passes: a reasoning model may run out of tokens, and lm-eval reports that itself.

    Args:
        outputs: bodies of the server's answers.
        prompts: number of prompts that were sent; None if it is not known.
        backend: lm-eval's name of the model, with the address of a server.

    Raises:
        WrongAnswerError: the answers are too few, too many, or not texts.
    """
    for body in outputs if isinstance(outputs, list) else [outputs]:
        if (choices := _choices(body, backend, prompts)) is None:
            raise WrongAnswerError(f"Expected generated texts (`choices`) from {backend}, found {brief(body)}")
        for choice in choices:
            if choice.get("finish_reason") == "content_filter":
                continue
            message = choice.get("message")
            holder, name = (choice, "text") if message is None else (message, "content")
            if not isinstance(holder, Mapping) or not isinstance(holder.get(name, 0), str | None):
                raise WrongAnswerError(f"Expected a generated text from {backend}, found {brief(choice)}")


def prompt_tokens(outputs: Any) -> int | None:
    """Returns the number of tokens of one prompt that a server reports in `usage`, None if it reports none."""
    body = outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs
    usage = body.get("usage") if isinstance(body, Mapping) else None
    return _count(usage.get("prompt_tokens")) if isinstance(usage, Mapping) else None


def _answers(outputs: Any, batch: PromptBatch) -> list[_Answer] | None:
    """Returns the answers in the order of the prompts, None for an unknown format."""
    bodies = outputs if isinstance(outputs, list) else [outputs]
    if all(hasattr(output, "prompt_logprobs") for output in bodies):
        _check_count(len(bodies), batch)
        return [_of_engine(output, prompt) for output, prompt in zip(bodies, batch.prompts, strict=True)]
    if all(isinstance(output, Mapping) and "meta_info" in output for output in bodies):
        _check_count(len(bodies), batch)
        return [_of_sglang(output["meta_info"], batch) for output in bodies]
    if not batch.of_completions and not all(isinstance(output, Mapping) and "choices" in output for output in bodies):
        return None
    choices = _choices(bodies[0], batch.backend, len(batch.prompts)) if len(bodies) == 1 else None
    if choices is None:
        raise WrongAnswerError(f"Expected choices with log-probabilities from {batch.backend}, found {brief(outputs)}")
    # for several prompts, a server reports only the total number of tokens
    read = prompt_tokens(bodies[0]) if len(choices) == 1 else None
    return [_of_completions(choice, read, batch) for choice in choices]


def _check_count(answers: int, batch: PromptBatch) -> None:
    if answers != len(batch.prompts):
        raise WrongAnswerError(f"Expected {len(batch.prompts)} answers from {batch.backend}, found {answers}")


def _choices(body: Any, backend: str, prompts: int | None) -> list[Mapping[str, Any]] | None:
    """Returns the choices of a response body in the order of their indices, None if it has no list of choices."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        return None
    expected = len(choices) if prompts is None else prompts
    if len(choices) != expected:
        raise WrongAnswerError(f"Expected {expected} answers from {backend}, found {len(choices)}")
    by_index = {choice["index"]: choice for choice in choices if _count(choice.get("index")) is not None}
    if {*by_index} != {*range(expected)}:
        indices = brief([choice.get("index") for choice in choices])
        raise WrongAnswerError(
            f"Expected each index from 0 to {expected - 1} once in an answer from {backend}, found {indices}"
        )
    return [by_index[index] for index in range(expected)]


def _of_completions(choice: Mapping[str, Any], read: int | None, batch: PromptBatch) -> _Answer:
    """Reads a choice of `/v1/completions` with `echo`. Its last entry is the one token generated after the prompt."""
    record = choice.get("logprobs")
    columns: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    logprobs, best, tokens = (
        columns[name] if isinstance(columns.get(name), list) else None
        for name in ("token_logprobs", "top_logprobs", "tokens")
    )
    ids = choice.get("prompt_token_ids")
    echoed: list[Any] | None = None
    if isinstance(ids, list):
        echoed = ids
    elif tokens:
        echoed = tokens[:-1]
    return _Answer((logprobs or [])[:-1], best and best[:-1], echoed, choice.get("text"), read)


def _of_sglang(meta: Any, batch: PromptBatch) -> _Answer:
    rows, top = (meta.get(name) for name in ("input_token_logprobs", "input_top_logprobs"))
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) and len(row) > 1 for row in rows):
        raise WrongAnswerError(
            f"Expected a list of log-probability and token pairs (`input_token_logprobs`) from {batch.backend}, found "
            f"{brief(rows)}"
        )
    logprobs, ids = [row[0] for row in rows], [row[1] for row in rows]
    best: list[Any] | None = None
    if isinstance(top, list):
        pairs = [of if isinstance(of, list) and all(len(row) > 1 for row in of) else None for of in top]
        best = [None if of is None else {row[1]: row[0] for row in of} for of in pairs]
    return _Answer(logprobs, best, ids, None, _count(meta.get("prompt_tokens")))


def _of_engine(output: Any, prompt: Sequence[int]) -> _Answer:
    """Reads an output of vLLM in this process: for each token of the prompt, log-probabilities by token id."""
    rows = output.prompt_logprobs or []
    by_token = [row and {token: getattr(of, "logprob", of) for token, of in row.items()} for row in rows]
    prompt_logprobs = [row and row.get(token) for token, row in zip(prompt, by_token, strict=False)]
    prompt_logprobs += [None] * (len(by_token) - len(prompt_logprobs))
    ids = getattr(output, "prompt_token_ids", None)
    return _Answer(prompt_logprobs, by_token, ids, None, None if ids is None else len(ids))


def _miscounted(answer: _Answer, prompt: Sequence[int], batch: PromptBatch) -> str:
    """Returns how the number of scored tokens differs from the prompt's, with a remedy; "" if they are equal."""
    count = len(prompt)
    entries = answer.logprobs
    scored = min(1, len(entries)) + sum(value is not None for value in entries[1:])
    read = scored if answer.read is None else answer.read
    if read == count + 1:
        first = answer.tokens[0] if answer.tokens else None
        return f"that it puts a token of its own before them ({first!r}): configure it to add no special tokens"
    if read == count - 1 and prompt[0] == batch.bos:
        return f"that it drops the first, BOS ({prompt[0]}): configure it to use prompts unchanged"
    if read > count:
        return f"that it read {read}: send token ids, not text (tokenized_requests=True)"
    if read < count and not (answer.read is None and scored < count <= len(entries)) and scored:
        return f"that it read {read}, so it truncates prompts: start it with a longer maximum length"
    if scored != count or len(entries) != count:
        remedy = "returns all of them with echo=True, as vLLM does and llama.cpp does not"
        if scored > count or len(entries) > count:
            remedy = "generates one token after the prompt, as max_tokens=1 requests"
        return f"log-probabilities of {scored}: use a server that {remedy}"
    return ""


def _echo_difference(answer: _Answer, prompt: Sequence[int], tokenizer: Any) -> str:
    """Returns where the echoed tokens or text differ from the prompt; "" if they are equal."""
    tokens = answer.tokens
    if tokens is not None and len(tokens) != len(prompt):
        return f"{len(tokens)} echoed tokens"
    cause = "it answers another prompt, or uses another tokenizer"
    token_texts = _token_texts(tokenizer)
    for position, (token, name) in enumerate(zip(prompt, tokens or (), strict=bool(tokens))):
        id_match = _TOKEN_ID.fullmatch(name) if isinstance(name, str) else None
        echoed_id = int(id_match[1]) if id_match else _count(name)
        if echoed_id is not None:
            differs = echoed_id != token
        else:
            differs = isinstance(name, str) and token_texts is not None and not token_texts.fits(token, name)
        if differs:
            expected = token_texts.name(token) if token_texts else token
            return f"the token {brief(name)} in place of {expected} at position {position}: {cause}"
    has_tokens = any(isinstance(name, str | int) for name in tokens or ())
    if token_texts and not has_tokens and token_texts.is_other(prompt, answer.text):
        return f"the text {brief(answer.text)}: {cause}"
    return ""


def _impossible(answer: _Answer, scored_from: int, tokenizer: Any) -> str:
    """Returns which log-probability no model can give; "" if all are possible."""
    logprobs, best = answer.logprobs, answer.best
    if logprobs and logprobs[0] is not None:
        return f"{brief(logprobs[0])} for the first token, which has no log-probability: the list may be shifted"
    for position, value in enumerate(logprobs[1:], 1):
        if not _is_number(value) or math.isnan(value) or value > ROUNDING_NATS:
            above = " above 0" if _is_number(value) and value > 0 else ""
            return f"a log-probability{above} of {brief(value)} for the token at position {position}"
        if value <= LEAST_NATS and position >= scored_from:
            return (
                f"{brief(value)} for the token at position {position}, which stands for minus infinity: run the model "
                "in float32 and check its weights"
            )
    if len(logprobs) > _LEAST_ZEROS and not any(logprobs[1:]):
        return f"that all are exactly 0, which no model computes: {ECHO_REMEDY}"
    if best is None or len(best) != len(logprobs):
        entries = "none" if best is None else str(len(best))
        return f"{entries} of the most probable tokens (top_logprobs) for {len(logprobs)} tokens"
    names = answer.tokens or [None] * len(logprobs)
    for position, (value, alternatives, name) in enumerate(zip(logprobs, best, names, strict=True)):
        if position == 0:
            continue
        if not isinstance(alternatives, Mapping) or not alternatives or not all(map(_is_number, alternatives.values())):
            return f"{brief(alternatives)} as the most probable tokens at position {position}"
        highest = max(alternatives.values())
        if not all(logprob <= ROUNDING_NATS for logprob in alternatives.values()):
            return f"a log-probability above 0 for a probable token at position {position} ({brief(alternatives)})"
        if math.fsum(map(math.exp, alternatives.values())) > 1 + ROUNDING_NATS:
            return f"probabilities that add up to more than 1 at position {position} ({brief(alternatives)})"
        if highest < value - _SAME_NATS:
            return (
                f"{brief(highest)} for the most probable token at position {position}, below {value} for the prompt's "
                "token"
            )
        if highest < -math.log(_vocabulary(tokenizer)):
            return (
                f"{brief(highest)} for the most probable token at position {position}, lower than one over the size of "
                "the vocabulary"
            )
        listed = alternatives.get(name, value) if isinstance(name, Hashable) else value
        if listed != value and (listed < value or _is_single_token(tokenizer, name)):
            return f"two log-probabilities of the token at position {position} ({value} and {listed})"
    return ""


class _TokenTexts:
    """The texts that servers write for a token: the vocabulary's entry or the decoded text, stripped of spaces.

    Parts of a character, white space and special tokens are written in too many ways, so any text fits them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {*(getattr(tokenizer, "all_special_ids", None) or ())}
        self._known: dict[int, frozenset[str]] = {}

    def of(self, token: int) -> frozenset[str]:
        if token not in self._known:
            decoded = str(self._tokenizer.decode([token]))
            names = {decoded.strip(_SPACES)}
            if hasattr(self._tokenizer, "convert_ids_to_tokens"):
                names.add(str(self._tokenizer.convert_ids_to_tokens(token)).strip(_SPACES))
            is_any = token in self._special or _UNKNOWN in decoded or "" in names
            self._known[token] = frozenset() if is_any else frozenset(names)
        return self._known[token]

    def fits(self, token: int, name: str) -> bool:
        known = self.of(token)
        bare = name.strip(_SPACES)
        return not known or not bare or _UNKNOWN in name or bool(_BYTES.match(name)) or bare in known

    def name(self, token: int) -> str:
        return brief(str(self._tokenizer.decode([token])))

    def is_other(self, prompt: Sequence[int], text: Any) -> bool:
        """Whether an echoed text, at least as long as the prompt's, begins differently; ignores white space."""
        if not isinstance(text, str):
            return False
        echoed = "".join(text.split())
        decoded = {self._tokenizer.decode([*prompt])}
        if self._special:
            decoded.add(self._tokenizer.decode([*prompt], skip_special_tokens=True))
        prompts = ["".join(prompt_text.split()) for prompt_text in decoded]
        shortest = min(map(len, prompts))
        if shortest == 0 or len(echoed) < shortest:
            return False
        fits = any(echoed.startswith(prompt_text) for prompt_text in prompts)
        return not fits and not any(_UNKNOWN in prompt_text for prompt_text in prompts)


@functools.lru_cache(maxsize=4)
def _token_texts_of(tokenizer: Any) -> _TokenTexts:
    return _TokenTexts(tokenizer)


def _token_texts(tokenizer: Any) -> _TokenTexts | None:
    """Returns the token texts of a local tokenizer; None for a tokenizer on a server: each text needs a request."""
    local = any(hasattr(tokenizer, name) for name in ("convert_ids_to_tokens", "decode_single_token_bytes"))
    return _token_texts_of(tokenizer) if local else None


@functools.lru_cache(maxsize=4)
def _tokens_by_text(tokenizer: Any) -> Mapping[str, set[int]]:
    ids = range(len(tokenizer))
    tokens: dict[str, set[int]] = {}
    for texts in (tokenizer.batch_decode([[token] for token in ids]), tokenizer.convert_ids_to_tokens([*ids])):
        for token, text in zip(ids, texts, strict=True):
            tokens.setdefault(str(text), set()).add(token)
    return tokens


def _is_single_token(tokenizer: Any, name: Any) -> bool:
    """Whether a name in a server's answer means exactly one token.

    Two tokens with the same text share one entry in alternatives that are named by text.
    """
    if not isinstance(name, str) or _TOKEN_ID.fullmatch(name):
        return True
    if _UNKNOWN in name or not all(hasattr(tokenizer, method) for method in ("convert_ids_to_tokens", "batch_decode")):
        return False
    return len(_tokens_by_text(tokenizer).get(name, ())) == 1


def _vocabulary(tokenizer: Any) -> int:
    """Returns a generous upper bound on the size of the model's vocabulary, which may be padded."""
    size = getattr(tokenizer, "n_vocab", None) or (len(tokenizer) if hasattr(tokenizer, "__len__") else 0)
    return 8 * size or 2**30


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
