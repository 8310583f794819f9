"""Checks the answers of servers and engines before lm-eval's model classes parse them.

lm-eval parses an answer in a method of the model's class. `guard` monkey-patches that method on the model object with
one that checks the answer first. Exceptions that lm-eval raises while parsing become a `UserError` of one sentence too.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval.api.registry import model_registry

from sbeval.errors import UserError, brief, first_line
from sbeval.results.records import USERINFO
from sbeval.scoring.returned import ECHO_REMEDY, PromptBatch, WrongAnswerError, check_echo, check_scores, check_texts

SCORE_READERS = ("parse_logprobs", "_parse_logprobs")
"""lm-eval's methods that parse log-probabilities: the first for servers, the second for engines such as vLLM."""
TEXT_READER = "parse_generations"
_COMPLETIONS = "LocalCompletionsAPI"
_BODIES_OF_OPENAI = (_COMPLETIONS, "LocalChatCompletion")
_prompts: contextvars.ContextVar[int | None] = contextvars.ContextVar("prompts", default=None)
"""Number of prompts in the request that this asyncio task awaits."""


def guard(lm: Any) -> None:
    """Monkey-patches an lm-eval model object so that every answer is checked before it is parsed; idempotent."""
    for name in SCORE_READERS:
        if hasattr(lm, name) and name not in vars(lm):
            setattr(lm, name, functools.partial(_read_scores, lm, getattr(lm, name), _definer(lm, name)))
    if hasattr(lm, TEXT_READER) and _definer(lm, TEXT_READER) in _BODIES_OF_OPENAI and TEXT_READER not in vars(lm):
        setattr(lm, TEXT_READER, functools.partial(_read_texts, lm, getattr(lm, TEXT_READER)))
        lm.amodel_call = functools.partial(_count_prompts_and_call, lm.amodel_call)


def guard_gguf(kind: type[Any]) -> None:
    """Monkey-patches lm-eval's model class `gguf` so that every answer is checked before it is parsed.

    That class skips an answer without log-probabilities, and would then take the next request's answer for this one.
    """
    original = kind.gguf_completion

    @functools.wraps(original)
    def gguf_completion(self: Any, context: str, continuation: str | None = None, **rest: Any) -> Any:
        backend = backend_name(self, "gguf")
        try:
            body = original(self, context, continuation, **rest)
        except RuntimeError as error:  # raised after the last retry; the server's own reason is in the log
            remedy = f"start the server, or {ECHO_REMEDY}"
            raise WrongAnswerError(f"Expected an answer from {backend}, found none ({error}): {remedy}.") from error
        with _parse_errors_as_user_errors(backend, body):
            if continuation is not None:
                check_echo(body, context + continuation, len(context), backend)
            else:
                check_texts(body, 1, backend)
        return body

    kind.gguf_completion = gguf_completion


def backend_name(lm: Any, name: str | None = None) -> str:
    """Returns lm-eval's name of the model and its server's address, without user name and password.

    lm-eval registers some models under several names; `name` chooses one of them, None means the first.
    """
    names: list[str] = [known for known, kind in model_registry.items() if kind is type(lm)] or [type(lm).__name__]
    address = USERINFO.sub("", str(getattr(lm, "base_url", None) or ""))
    return (name or names[0]) + (f" at {address}" if address else "")


def _definer(lm: Any, method: str) -> str:
    return next(kind.__name__ for kind in type(lm).__mro__ if method in vars(kind))


def _read_scores(lm: Any, read: Callable[..., Any], definer: str, *, outputs: Any, tokens: Any, **rest: Any) -> Any:
    prompts = tokens if isinstance(tokens[0], list | tuple) else [tokens]
    scored_from = rest.get("ctxlens") or [rest.get("ctxlen", 1)] * len(prompts)
    batch = PromptBatch(
        backend=backend_name(lm),
        prompts=prompts,
        scored_from=scored_from,
        tokenizer=getattr(lm, "tokenizer", None),
        bos=getattr(lm, "prefix_token_id", None),
        of_completions=definer == _COMPLETIONS,
    )
    with _parse_errors_as_user_errors(batch.backend, outputs, prompts):
        check_scores(outputs, batch)
        return read(outputs=outputs, tokens=tokens, **rest)


def _read_texts(lm: Any, read: Callable[..., Any], *, outputs: Any, **rest: Any) -> Any:
    contexts = rest.get("contexts")
    prompts = _prompts.get() if contexts is None else len(contexts)
    backend = backend_name(lm)
    with _parse_errors_as_user_errors(backend, outputs):
        check_texts(outputs, prompts, backend)
        return read(outputs=outputs, **rest)


@contextlib.contextmanager
def _parse_errors_as_user_errors(backend: str, outputs: Any, prompts: Sequence[Sequence[int]] = ()) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a field of an unexpected type can raise anything
        reason = f"{type(error).__name__} ({first_line(error)}) in {brief(outputs)}"
        prompt = prompts[0] if len(prompts) == 1 else None
        raise WrongAnswerError(
            f"Expected an answer of {backend} that lm-eval can read, found {reason}", prompt
        ) from error


def _count_prompts_and_call(call: Callable[..., Any], *args: Any, messages: Sequence[Any], **rest: Any) -> Any:
    _prompts.set(len(messages))  # a context variable: set only for this asyncio task
    return call(*args, messages=messages, **rest)
