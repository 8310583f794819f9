"""Runs the self-test of a prepared model: rank 0 runs it for all ranks, broadcasts the outcome and saves it."""

import contextlib
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sbeval.checkpoints.quiet import quiet_transformers
from sbeval.errors import UserError, first_line
from sbeval.fingerprint.parts import installed_version, short_sha256
from sbeval.foreign_files import read_json_object
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.writing import whole_file
from sbeval.model_adapters.batching import free_memory, out_of_memory
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.prepare.prepared import Prepared
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.model_adapters.record import run_settings
from sbeval.model_adapters.self_test import outcome as names
from sbeval.model_adapters.self_test.measured import EAGER, TOKENS, Measured, Nothing
from sbeval.model_adapters.self_test.outcome import NOT_NEEDED, Outcome, fastest
from sbeval.model_adapters.self_test.real import RealBatches
from sbeval.model_adapters.self_test.through_cache import with_tested_cache
from sbeval.model_adapters.session import Session
from sbeval.processes import ranks

# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
logger = logging.getLogger("lm_eval.sbeval.self_test")

_VERSION = 6
"""The version of the test. After it is raised, saved outcomes are ignored and every model is tested again."""
_OWN = ("sbeval", "moduleformer")
# packages whose kernels replace a model's own code if they are installed
_KERNELS = ("mamba-ssm", "causal-conv1d", "flash-attn", "kernels", "flash-linear-attention", "bitsandbytes", "torchao")
_DECIDE = (
    "inputs",
    "device",
    "dtype",
    "mixed_precision_dtype",
    "rope_scaling",
    "extrapolation",
    "kernels",
    "arguments",
)


def begin(opened: Opened, prepared: Prepared) -> Session | None:
    """Returns the session of a prepared model after its self-test, None for an encoder-decoder model.

    Raises:
        UserError: an option does not suit the model, the model does not run with the `attn_implementation` that the
            user passed, or the cache that the user passed fails its test.
    """
    return with_tested_cache(tested(Session.of(opened, prepared))) if opened.causal else None


def tested(session: Session) -> Session:
    """Runs the self-test and returns the session with the limits that its outcome allows; logs the outcome.

    Every rank must call it: the outcome of rank 0 counts for all.

    Raises:
        UserError: the model runs, but not with the `attn_implementation` that the user passed.
    """
    opened = session.opened
    if getattr(opened.model.config, "model_type", None) in _OWN:
        return session
    outcomes: list[Outcome | UserError] = [NOT_NEEDED]
    if opened.rank == 0:
        try:
            outcomes = [_outcome(session)]
        except UserError as error:  # raised on every rank below: the other ranks wait for the outcome
            outcomes = [error]
    if opened.world_size > 1 and torch.distributed.is_available() and torch.distributed.is_initialized():
        with ranks.waiting():
            torch.distributed.broadcast_object_list(outcomes, src=0)
    (outcome,) = outcomes
    if isinstance(outcome, UserError):
        raise outcome
    if ranks.is_first_process():
        differs_from_eager = names.ATTENTION in outcome.failed  # the user passed it, or `outcome.attention` replaces it
        slower = differs_from_eager or {outcome.scoring, outcome.generation} != {names.TOGETHER}
        unknown = outcome.untested is not None and opened.options.self_test
        logger.log(logging.WARNING if slower or unknown else logging.INFO, "self-test: %s", outcome)
    if outcome.attention is not None:
        opened.model.set_attn_implementation(outcome.attention)
    return dataclasses.replace(
        session,
        real=RealBatches(outcome, opened, _tokens(opened)) if outcome.untested is None else RealBatches(outcome),
        batches=outcome.limits(session.batches, outcome.scoring),
        own_batches=outcome.limits(session.own_batches, outcome.scoring),
        generation_batches=outcome.limits(session.batches, outcome.generation),
    )


@torch.no_grad()
def _outcome(session: Session) -> Outcome:
    """Returns the saved outcome for the same model and package versions; if there is none, tests the model."""
    opened = session.opened
    name = type(opened.model).__name__
    if not opened.options.self_test:
        return Outcome(model=name, untested="self_test=false")
    place = _place(session)
    if place is not None:
        with contextlib.suppress(UserError, KeyError, TypeError, AttributeError, ValueError):
            return Outcome.from_json(read_json_object(place, "a self-test"))
    attention = getattr(opened.model.config, "_attn_implementation", None)
    try:
        with session.autocast(), session.rope.hold(TOKENS), quiet_transformers(), _uncompiled(attention):
            outcome = _decided(session)
    except Exception as error:  # the code of a model can raise anything; it will raise it again in the run
        if out_of_memory(error):
            free_memory()
        elif attention is not None and "attn_implementation" in opened.arguments and not isinstance(error, Nothing):
            raised = _raised(session, attention)
            if raised is not None and _raised(session, EAGER) is None:
                expected = f"Expected an attn_implementation with which {name} runs on {opened.device.type}"
                remedy = "leave it out of --model_args, or name another"
                raise UserError(f"{expected}, found {attention} ({first_line(raised)}): {remedy}.") from error
        _set_attention(opened.model, attention)
        return Outcome(model=name, untested=first_line(error))
    if place is not None:
        with contextlib.suppress(UserError), whole_file(place, "a self-test") as new:
            new.write_text(json.dumps(outcome.to_json()))
    return outcome


def _set_attention(model: Any, attention: str | None) -> None:
    if getattr(model.config, "_attn_implementation", None) != attention:
        model.set_attn_implementation(attention)


def _raised(session: Session, attention: str) -> Exception | None:
    """Returns the error that the model raises with this attention implementation, None if a forward pass succeeds."""
    opened = session.opened
    try:
        _set_attention(opened.model, attention)
        with session.autocast(), session.rope.hold(TOKENS), quiet_transformers():
            Measured(opened, _tokens(opened))
    except Exception as error:  # the code of a model can raise anything
        return None if isinstance(error, Nothing) else error
    return None


@contextlib.contextmanager
def _uncompiled(attention: str | None) -> Iterator[None]:
    """Runs FlexAttention uncompiled until the block ends: compiling for each shape of the test would take seconds."""
    with contextlib.ExitStack() as stack:
        if attention == "flex_attention":
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def _place(session: Session) -> Path | None:
    """Returns the path of the file with the saved outcome; its name hashes everything that the outcome depends on.

    Returns None for a model in memory, and for a tensor-parallel model, which all ranks must test at the same time.
    """
    opened = session.opened
    if opened.source is None or opened.shares_model:
        return None
    try:
        settings = run_settings(session)
    except UserError:
        return None
    devices = {opened.device, *(parameter.device for parameter in opened.model.parameters())}
    gpus = sorted(map(torch.cuda.get_device_name, {each.index or 0 for each in devices if each.type == "cuda"}))
    key = short_sha256([_VERSION, gpus, *map(installed_version, _KERNELS), *(settings[name] for name in _DECIDE)])
    return cache_folder("self_tests") / f"{key}.json"


def _decided(session: Session) -> Outcome:
    opened = session.opened
    model, tokens = opened.model, _tokens(opened)
    if session.learned_positions is not None and session.learned_positions < TOKENS:
        raise Nothing(f"it has {session.learned_positions} positions")
    measured, checks, attention = Measured(opened, tokens), dict[str, names.Check](), None
    checks[names.AGAIN] = measured.check(measured.again, measured.least)
    checks[names.LATER_TOKENS] = measured.check(measured.later_tokens)
    if session.rope.extrapolation is None:  # extrapolation replaces the attention implementation
        attended = checks[names.ATTENTION] = measured.check(measured.attention)
        named = "attn_implementation" in opened.arguments
        if named and not attended.passed and attended.difference is None:
            raise RuntimeError(attended.reason)  # only this check compiles attention, as the evaluation does
        if not attended.passed and not named:
            attention = EAGER
            model.set_attn_implementation(EAGER)
            measured = Measured(opened, tokens)
            checks |= {
                names.AGAIN: measured.check(measured.again, measured.least),
                names.LATER_TOKENS: measured.check(measured.later_tokens),
            }
    padded = measured.check(lambda: measured.rows(padded=True))
    checks[names.ROWS] = padded if padded.passed else measured.check(lambda: measured.rows(padded=False))
    checks[names.RIGHT_PADDING] = padded
    if not getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        checks |= {names.SEVERAL: measured.check(measured.continued), names.LENGTH: measured.length()}
    # if a padded batch is right, so are an unpadded batch and a single text
    padded = measured.check(lambda: measured.generated(padded=True))
    rows = padded if padded.passed else measured.check(lambda: measured.generated(padded=False))
    alone = rows if rows.passed else measured.check(lambda: measured.generated(padded=False, rows=1))
    checks |= {names.LEFT_PADDING: padded, names.ROWS_GENERATED: rows, names.ONE: alone}
    if not alone.passed:
        uncached = lambda: measured.generated(padded=False, rows=1, cached=False)  # noqa: E731
        checks[names.UNCACHED] = measured.check(uncached)
    of_generation = [checks[name] for name, _ in names.GENERATION if name in checks]
    # a model that fails in every way raises the error again when the run generates, so it is not refused here
    raises = all(not check.passed and check.difference is None for check in of_generation)
    again = checks[names.AGAIN].passed
    # a wrong length of the cache makes the masks of padded texts wrong, even if the difference is below the limit
    uncounted = names.LENGTH in checks and not checks[names.LENGTH].passed
    generation = names.TOGETHER if raises else fastest(names.GENERATION[uncounted:], checks)
    return Outcome(
        model=type(model).__name__,
        rounding=measured.allowed.mean,
        checks=checks,
        scoring=fastest(names.SCORING, checks) if again and checks[names.LATER_TOKENS].passed else names.REFUSED,
        generation=generation if again else names.REFUSED,
        prefixes=all(checks[name].passed for name in (names.SEVERAL, names.LENGTH) if name in checks),
        attention=attention,
    )


def _tokens(opened: Opened) -> list[int]:
    """Returns token ids of ordinary text, or ids spread over the vocabulary if the tokenizer hardly knows the text."""
    return sample_tokens(opened.tokenizer, opened.embeddings, TOKENS)
