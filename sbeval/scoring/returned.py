"""A right answer of a server or an engine that scores the tokens of prompts, stated once; all else is refused.

lm-eval adds up whatever comes back. A list that is shifted, an answer to another prompt or a log-probability above zero
would be a wrong number, and no error. So `check_scores` compares every answer with the protocol before lm-eval reads
it:

- A body holds as many choices as prompts were sent, and each index once.
- A choice has one entry for each token of its prompt. Only the first token, which nothing precedes, has no number.
- A log-probability is finite, and at most rounding above zero. They are not all exactly zero.
- The best alternative is at least as probable as the token. Two numbers for one token are equal.
- Tokens or texts that the server repeats are those of the prompt.

`check_echo` does the same for a prompt that was sent as text, and `check_texts` for generated texts. Three shapes are
known: completions of OpenAI's API, SGLang's own, and vLLM's in this process. lm-eval reads an answer of another shape
as it is.
"""

import functools
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from sbeval.errors import UserError, shown

ROUNDING_NATS = 0.01
"""By which a log-probability may exceed 0."""
LEAST_NATS = -9900.0
"""From here down a number stands for minus infinity: OpenAI's API and vLLM write -9999, in bf16 -9984."""
_LEAST_ZEROS = 4
_ECHO = "use a server that scores prompts (echo), as vLLM's does and llama.cpp's does not"
_SAME_NATS = 1e-4  # a server may round the numbers of the alternatives apart from those of the prompt
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_SPACES = " \t\r\n▁ĠĊ"
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_BYTES = re.compile(r"bytes:|<0x[\dA-F]{2}>")


class WrongAnswerError(UserError):
    """A server's answer that cannot be right; `prompt` are the tokens that it answers, where one prompt is at fault."""

    def __init__(self, message: str, prompt: Sequence[int] | None = None) -> None:
        super().__init__(message)
        self.prompt = None if prompt is None else [*prompt]


class OtherPromptError(WrongAnswerError):
    """An answer that repeats other tokens than those of its prompt."""


class Asked(NamedTuple):
    """The prompts of one call, and the server or engine that scores them.

    Attributes:
        backend: lm-eval's name of the model, with the address of a server.
        prompts: the tokens of each prompt.
        scored_from: for each prompt, how many tokens stand before those whose log-probabilities are added up.
        tokenizer: the prompts' tokenizer, None where there is none.
        bos: the token that lm-eval puts before a text, None where there is none.
        of_completions: whether only the shape of OpenAI's completions can be read.
    """

    backend: str
    prompts: Sequence[Sequence[int]]
    scored_from: Sequence[int]
    tokenizer: Any = None
    bos: int | None = None
    of_completions: bool = False


class _Answer(NamedTuple):
    """An answer to one prompt; each list has an entry for each token of the prompt.

    Attributes:
        logprobs: log-probability of each token, None for the first.
        best: log-probabilities of the most probable tokens by token, None for the first.
        tokens: ids or texts of the tokens, None where they are not told.
        text: the prompt's text, and what was generated behind it.
        read: how many tokens were read, None where that is not told.
    """

    logprobs: Sequence[Any]
    best: Sequence[Any] | None
    tokens: Sequence[Any] | None
    text: Any
    read: int | None


def check_scores(outputs: Any, asked: Asked) -> None:
    """Refuses an answer with log-probabilities that cannot be right; see the module's docstring.

    Raises:
        WrongAnswerError: naming what was expected and found, and the remedy.
    """
    answers = _answers(outputs, asked)
    if answers is None:
        return
    for answer, prompt, scored_from in zip(answers, asked.prompts, asked.scored_from, strict=True):
        if reason := _miscounted(answer, prompt, asked):
            said = f"Expected {asked.backend} to read and score the {len(prompt)} tokens of a prompt, found {reason}"
            raise WrongAnswerError(said, prompt)
        said = f"Expected {asked.backend} to tell the log-probabilities of the {len(prompt)} tokens of a prompt"
        if reason := _unlike(answer, prompt, asked.tokenizer):
            raise OtherPromptError(f"{said}, found {reason}", prompt)
        if reason := _impossible(answer, scored_from, asked.tokenizer):
            raise WrongAnswerError(f"{said}, found {reason}", prompt)


def check_echo(output: Any, prompt: str, scored_from: int, backend: str) -> None:
    """Refuses an answer with log-probabilities that cannot be right to a text, as lm-eval's model `gguf` sends it.

    No tokenizer is known there: that the whole text was read is seen by the places of its tokens (`text_offset`).

    Args:
        output: body of the server's answer.
        prompt: the text with its continuation.
        scored_from: characters before the continuation.
        backend: lm-eval's name of the model, with the address of a server.

    Raises:
        WrongAnswerError: naming what was expected and found, and the remedy.
    """
    asked = Asked(backend, [[]], [0], of_completions=True)
    said = f"Expected {backend} to tell the log-probabilities of the tokens of a prompt"
    choices = _choices(output, backend, 1)
    told = None if choices is None else choices[0].get("logprobs")
    if choices is None or not isinstance(told, Mapping):
        raise WrongAnswerError(f"{said}, found {shown(output)}; {_ECHO}")
    columns = [told.get(name) for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs")]
    if not all(isinstance(column, list) and len(column) == len(columns[0] or ()) > 2 for column in columns):
        raise WrongAnswerError(f"{said}, found {shown(told)}; {_ECHO}")
    offsets = columns[0] or []
    if not all(_is_number(offset) for offset in offsets) or offsets != sorted(offsets):
        raise WrongAnswerError(f"{said}, found places that are not in order ({shown(offsets)})")
    if offsets[-1] < len(prompt):
        found = f"those of {offsets[-1]} of its {len(prompt)} characters"
        raise WrongAnswerError(f"{said}, found {found}; start it with room for longer ones")
    first = next(place for place, offset in enumerate(offsets) if offset >= min(scored_from, offsets[-1]))
    if reason := _impossible(_of_completions(choices[0], None, asked), first, None):
        raise WrongAnswerError(f"{said}, found {reason}")


def check_texts(outputs: Any, prompts: int | None, backend: str) -> None:
    """Refuses generated texts that are not one for each prompt, in bodies as OpenAI's API has them.

    A choice without a text is lm-eval's matter, which says so: a model that thinks may run out of tokens.

    Args:
        outputs: bodies of the server's answers.
        prompts: how many prompts were sent; None where nobody knows.
        backend: lm-eval's name of the model, with the address of a server.

    Raises:
        WrongAnswerError: naming what was expected and found.
    """
    for body in outputs if isinstance(outputs, list) else [outputs]:
        if (choices := _choices(body, backend, prompts)) is None:
            raise WrongAnswerError(f"Expected generated texts (choices) from {backend}, found {shown(body)}")
        for choice in choices:
            if choice.get("finish_reason") == "content_filter":
                continue
            message = choice.get("message")
            holder, name = (choice, "text") if message is None else (message, "content")
            if not isinstance(holder, Mapping) or not isinstance(holder.get(name, 0), str | None):
                raise WrongAnswerError(f"Expected a generated text from {backend}, found {shown(choice)}")


def prompt_tokens(outputs: Any) -> int | None:
    """Returns how many tokens a server says that it read of one prompt, None where it does not say."""
    body = outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs
    usage = body.get("usage") if isinstance(body, Mapping) else None
    return _count(usage.get("prompt_tokens")) if isinstance(usage, Mapping) else None


def _answers(outputs: Any, asked: Asked) -> list[_Answer] | None:
    """Returns the answers in the order of the prompts, None for a shape that is not known."""
    several = outputs if isinstance(outputs, list) else [outputs]
    if all(hasattr(output, "prompt_logprobs") for output in several):
        _check_count(len(several), asked)
        return [_of_engine(output, prompt) for output, prompt in zip(several, asked.prompts, strict=True)]
    if all(isinstance(output, Mapping) and "meta_info" in output for output in several):
        _check_count(len(several), asked)
        return [_of_sglang(output["meta_info"], asked) for output in several]
    if not asked.of_completions and not all(isinstance(output, Mapping) and "choices" in output for output in several):
        return None
    if len(several) != 1 or (choices := _choices(several[0], asked.backend, len(asked.prompts))) is None:
        raise WrongAnswerError(f"Expected choices with log-probabilities from {asked.backend}, found {shown(outputs)}")
    # of several prompts a server tells how many tokens all have
    read = prompt_tokens(several[0]) if len(choices) == 1 else None
    return [_of_completions(choice, read, asked) for choice in choices]


def _check_count(answers: int, asked: Asked) -> None:
    if answers != len(asked.prompts):
        raise WrongAnswerError(f"Expected {len(asked.prompts)} answers from {asked.backend}, found {answers}")


def _choices(body: Any, backend: str, prompts: int | None) -> list[Mapping[str, Any]] | None:
    """Returns the choices of a body by index; None where it holds none."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        return None
    expected = len(choices) if prompts is None else prompts
    if len(choices) != expected:
        raise WrongAnswerError(f"Expected {expected} answers from {backend}, found {len(choices)}")
    places = {choice["index"]: choice for choice in choices if _count(choice.get("index")) is not None}
    if {*places} != {*range(expected)}:
        found = shown([choice.get("index") for choice in choices])
        raise WrongAnswerError(
            f"Expected each index from 0 to {expected - 1} once in an answer from {backend}, found {found}"
        )
    return [places[index] for index in range(expected)]


def _of_completions(choice: Mapping[str, Any], read: int | None, asked: Asked) -> _Answer:
    """Reads a choice of `/v1/completions` with `echo`: behind the prompt it holds one generated token."""
    told = choice.get("logprobs")
    told = told if isinstance(told, Mapping) else {}
    logprobs, best, tokens = (
        column if isinstance(column := told.get(name), list) else None
        for name in ("token_logprobs", "top_logprobs", "tokens")
    )
    ids = choice.get("prompt_token_ids")
    repeated: list[Any] | None = None
    if isinstance(ids, list):
        repeated = ids
    elif tokens:
        repeated = tokens[:-1]
    return _Answer((logprobs or [])[:-1], best and best[:-1], repeated, choice.get("text"), read)


def _of_sglang(meta: Any, asked: Asked) -> _Answer:
    rows, top = (meta.get(name) for name in ("input_token_logprobs", "input_top_logprobs"))
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) and len(row) > 1 for row in rows):
        raise WrongAnswerError(f"Expected rows of log-probability and token from {asked.backend}, found {shown(rows)}")
    logprobs, ids = [row[0] for row in rows], [row[1] for row in rows]
    best: list[Any] | None = None
    if isinstance(top, list):
        pairs = [of if isinstance(of, list) and all(len(row) > 1 for row in of) else None for of in top]
        best = [None if of is None else {row[1]: row[0] for row in of} for of in pairs]
    return _Answer(logprobs, best, ids, None, _count(meta.get("prompt_tokens")))


def _of_engine(output: Any, prompt: Sequence[int]) -> _Answer:
    """Reads what vLLM returns in this process: for each token of the prompt log-probabilities by token."""
    rows = output.prompt_logprobs or []
    by_token = [row and {token: getattr(of, "logprob", of) for token, of in row.items()} for row in rows]
    own = [row and row.get(token) for token, row in zip(prompt, by_token, strict=False)]
    ids = getattr(output, "prompt_token_ids", None)
    own += [None] * (len(by_token) - len(own))
    return _Answer(own, by_token, ids, None, None if ids is None else len(ids))


def _miscounted(answer: _Answer, prompt: Sequence[int], asked: Asked) -> str:
    """Returns why an answer is to other tokens than were sent, or to some of them; nothing where it is to all."""
    count = len(prompt)
    entries = answer.logprobs
    scored = min(1, len(entries)) + sum(value is not None for value in entries[1:])
    read = scored if answer.read is None else answer.read
    if read == count + 1:
        first = answer.tokens[0] if answer.tokens else None
        return f"that it puts one of its own before them ({first!r}); have it add no special tokens"
    if read == count - 1 and prompt[0] == asked.bos:
        return f"that it leaves out the first, BOS ({prompt[0]}); have it take prompts as they are"
    if read > count:
        return f"that it read {read}; send it tokens, not text (tokenized_requests=True)"
    if read < count and not (answer.read is None and scored < count <= len(entries)) and scored:
        return f"that it read {read}, since it cuts prompts; start it with room for longer ones"
    if scored != count or len(entries) != count:
        remedy = "tells all of them (echo), as vLLM's does and llama.cpp's does not"
        if scored > count or len(entries) > count:
            remedy = "generates one more, as it is asked to"
        return f"log-probabilities of {scored}; use a server that {remedy}"
    return ""


def _unlike(answer: _Answer, prompt: Sequence[int], tokenizer: Any) -> str:
    """Returns where the tokens or the text that came back differ from the prompt's; nothing where they do not."""
    tokens = answer.tokens
    if tokens is not None and len(tokens) != len(prompt):
        return f"the names of {len(tokens)} tokens"
    remedy = "it answers another prompt, or has another tokenizer"
    forms = _forms(tokenizer)
    for place, (token, name) in enumerate(zip(prompt, tokens or (), strict=bool(tokens))):
        told = _TOKEN_ID.fullmatch(name) if isinstance(name, str) else None
        number = int(told[1]) if told else _count(name)
        if number is not None:
            differs = number != token
        else:
            differs = isinstance(name, str) and forms is not None and not forms.fits(token, name)
        if differs:
            return f"the token {shown(name)} in place of {forms.name(token) if forms else token} at {place}; {remedy}"
    if forms and not any(isinstance(name, str | int) for name in tokens or ()) and forms.is_other(prompt, answer.text):
        return f"the text {shown(answer.text)}; {remedy}"
    return ""


def _impossible(answer: _Answer, scored_from: int, tokenizer: Any) -> str:
    """Returns which number no model gives; nothing where every one can be."""
    logprobs, best = answer.logprobs, answer.best
    if logprobs and logprobs[0] is not None:
        return f"one of the first ({shown(logprobs[0])}), which nothing precedes; its list may be shifted"
    for place, value in enumerate(logprobs[1:], 1):
        if not _is_number(value) or math.isnan(value) or value > ROUNDING_NATS:
            above = " above 0" if _is_number(value) and value > 0 else ""
            return f"a log-probability{above} of {shown(value)} for the token at {place}"
        if value <= LEAST_NATS and place >= scored_from:
            return (
                f"{shown(value)} for the token at {place}, which stands for minus infinity; run the model in float32 "
                "and check its weights"
            )
    if len(logprobs) > _LEAST_ZEROS and not any(logprobs[1:]):
        return f"that all are exactly 0, which is no model's answer; {_ECHO}"
    if best is None or len(best) != len(logprobs):
        found = "none" if best is None else str(len(best))
        return f"{found} of the most probable tokens (top_logprobs) for {len(logprobs)} tokens"
    names = answer.tokens or [None] * len(logprobs)
    for place, (value, alternatives, name) in enumerate(zip(logprobs, best, names, strict=True)):
        if place == 0:
            continue
        if not isinstance(alternatives, Mapping) or not alternatives or not all(map(_is_number, alternatives.values())):
            return f"{shown(alternatives)} as the most probable tokens at {place}"
        most = max(alternatives.values())
        if not all(of <= ROUNDING_NATS for of in alternatives.values()):
            return f"a log-probability above 0 among the most probable tokens at {place} ({shown(alternatives)})"
        if math.fsum(map(math.exp, alternatives.values())) > 1 + ROUNDING_NATS:
            return f"probabilities that add up to more than 1 at {place} ({shown(alternatives)})"
        if most < value - _SAME_NATS:
            return f"{shown(most)} for the most probable token at {place}, below {value} of the prompt's own"
        if most < -math.log(_vocabulary(tokenizer)):
            return f"{shown(most)} for the most probable token at {place}, fewer than the vocabulary admits"
        repeated = alternatives.get(name, value) if isinstance(name, Hashable) else value
        if repeated != value and (repeated < value or _is_of_one_token(tokenizer, name)):
            return f"two log-probabilities of the token at {place} ({value} and {repeated})"
    return ""


class _Forms:
    """The texts that servers write for a token: as the vocabulary has it, or decoded; without spaces around it.

    A part of a character, white space, and special tokens are written in too many ways, so any text fits them.
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
        return shown(str(self._tokenizer.decode([token])))

    def is_other(self, prompt: Sequence[int], text: Any) -> bool:
        """Whether a text as long as the prompt's begins otherwise; white space is not compared."""
        if not isinstance(text, str):
            return False
        given = "".join(text.split())
        written = {self._tokenizer.decode([*prompt])}
        if self._special:
            written.add(self._tokenizer.decode([*prompt], skip_special_tokens=True))
        bare = ["".join(of.split()) for of in written]
        is_echo = len(given) >= min(map(len, bare)) and min(map(len, bare)) > 0
        return is_echo and not any(given.startswith(of) for of in bare) and not any(_UNKNOWN in of for of in bare)


@functools.lru_cache(maxsize=4)
def _forms_of(tokenizer: Any) -> _Forms:
    return _Forms(tokenizer)


def _forms(tokenizer: Any) -> _Forms | None:
    """Returns the texts of a tokenizer's tokens; None where it is a server's, which would be asked for each."""
    local = any(hasattr(tokenizer, name) for name in ("convert_ids_to_tokens", "decode_single_token_bytes"))
    return _forms_of(tokenizer) if local else None


@functools.lru_cache(maxsize=4)
def _tokens_by_text(tokenizer: Any) -> Mapping[str, set[int]]:
    ids = range(len(tokenizer))
    tokens: dict[str, set[int]] = {}
    for texts in (tokenizer.batch_decode([[token] for token in ids]), tokenizer.convert_ids_to_tokens([*ids])):
        for token, text in zip(ids, texts, strict=True):
            tokens.setdefault(str(text), set()).add(token)
    return tokens


def _is_of_one_token(tokenizer: Any, name: Any) -> bool:
    """Whether a name stands for one token: alternatives that are named by text tell two of one text only once."""
    if not isinstance(name, str) or _TOKEN_ID.fullmatch(name):
        return True
    if _UNKNOWN in name or not all(hasattr(tokenizer, of) for of in ("convert_ids_to_tokens", "batch_decode")):
        return False
    return len(_tokens_by_text(tokenizer).get(name, ())) == 1


def _vocabulary(tokenizer: Any) -> int:
    """Returns more tokens than a model with this tokenizer has, by a wide margin: matrices are padded."""
    size = getattr(tokenizer, "n_vocab", None) or (len(tokenizer) if hasattr(tokenizer, "__len__") else 0)
    return 8 * size or 2**30


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
