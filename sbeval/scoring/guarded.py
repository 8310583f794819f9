"""Models of lm-eval that ask a server or an engine: every answer is checked before lm-eval reads it.

lm-eval reads an answer in a method of the model's class. `guard` puts a method of the same name on the model, which
checks the answer and calls the class's. What lm-eval raises as it reads an answer becomes one sentence too.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lm_eval.api.registry import model_registry

from sbeval.errors import UserError, first_line, shown
from sbeval.results.records import USERINFO
from sbeval.scoring.returned import Asked, WrongAnswerError, check_echo, check_scores, check_texts

SCORE_READERS = ("parse_logprobs", "_parse_logprobs")
"""lm-eval's methods that read log-probabilities, of servers and of engines."""
TEXT_READER = "parse_generations"
_COMPLETIONS = "LocalCompletionsAPI"
_BODIES_OF_OPENAI = (_COMPLETIONS, "LocalChatCompletion")
_prompts: contextvars.ContextVar[int | None] = contextvars.ContextVar("prompts", default=None)
"""How many prompts the request holds that is being awaited."""


def guard(lm: Any) -> None:
    """Has every answer that a model reads checked; a second call does nothing."""
    for name in SCORE_READERS:
        if hasattr(lm, name) and name not in vars(lm):
            setattr(lm, name, functools.partial(_read_scores, lm, getattr(lm, name), _definer(lm, name)))
    if hasattr(lm, TEXT_READER) and _definer(lm, TEXT_READER) in _BODIES_OF_OPENAI and TEXT_READER not in vars(lm):
        setattr(lm, TEXT_READER, functools.partial(_read_texts, lm, getattr(lm, TEXT_READER)))
        lm.amodel_call = functools.partial(_awaited, lm.amodel_call)


def guard_gguf(kind: type[Any]) -> None:
    """Checks every answer that lm-eval's model `gguf` reads, before it reads it.

    That model passes over an answer without log-probabilities, and gives the next answer to the request.
    """
    original = kind.gguf_completion

    @functools.wraps(original)
    def gguf_completion(self: Any, context: str, continuation: str | None = None, **rest: Any) -> Any:
        backend = backend_name(self, "gguf")
        try:
            body = original(self, context, continuation, **rest)
        except RuntimeError as error:  # after its last try; the log holds the server's own reason
            remedy = "start the server, or use one that scores prompts (echo), as vLLM's does and llama.cpp's does not"
            raise WrongAnswerError(f"Expected an answer from {backend}, found none ({error}): {remedy}.") from error
        with _one_sentence(backend, body):
            if continuation is not None:
                check_echo(body, context + continuation, len(context), backend)
            else:
                check_texts(body, 1, backend)
        return body

    kind.gguf_completion = gguf_completion


def backend_name(lm: Any, name: str | None = None) -> str:
    """Returns lm-eval's name of a model, with the address of a server, without a key in it.

    lm-eval knows some models by several names; `name` is the one to use, None the first.
    """
    names: list[str] = [of for of, kind in model_registry.items() if kind is type(lm)] or [type(lm).__name__]
    address = USERINFO.sub("", str(getattr(lm, "base_url", None) or ""))
    return (name or names[0]) + (f" at {address}" if address else "")


def _definer(lm: Any, method: str) -> str:
    return next(kind.__name__ for kind in type(lm).__mro__ if method in vars(kind))


def _read_scores(lm: Any, read: Callable[..., Any], definer: str, *, outputs: Any, tokens: Any, **rest: Any) -> Any:
    prompts = tokens if isinstance(tokens[0], list | tuple) else [tokens]
    scored_from = rest.get("ctxlens") or [rest.get("ctxlen", 1)] * len(prompts)
    asked = Asked(
        backend=backend_name(lm),
        prompts=prompts,
        scored_from=scored_from,
        tokenizer=getattr(lm, "tokenizer", None),
        bos=getattr(lm, "prefix_token_id", None),
        of_completions=definer == _COMPLETIONS,
    )
    with _one_sentence(asked.backend, outputs, prompts):
        check_scores(outputs, asked)
        return read(outputs=outputs, tokens=tokens, **rest)


def _read_texts(lm: Any, read: Callable[..., Any], *, outputs: Any, **rest: Any) -> Any:
    contexts = rest.get("contexts")
    prompts = _prompts.get() if contexts is None else len(contexts)
    backend = backend_name(lm)
    with _one_sentence(backend, outputs):
        check_texts(outputs, prompts, backend)
        return read(outputs=outputs, **rest)


@contextlib.contextmanager
def _one_sentence(backend: str, outputs: Any, prompts: Sequence[Sequence[int]] = ()) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a field of another type leads to
        reason = f"{type(error).__name__} ({first_line(error)}) in {shown(outputs)}"
        prompt = prompts[0] if len(prompts) == 1 else None
        raise WrongAnswerError(f"Expected an answer that can be read from {backend}, found {reason}", prompt) from error


def _awaited(call: Callable[..., Any], *args: Any, messages: Sequence[Any], **rest: Any) -> Any:
    _prompts.set(len(messages))  # of this task of asyncio alone
    return call(*args, messages=messages, **rest)
