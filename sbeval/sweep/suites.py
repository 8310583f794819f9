"""Suites, the named sets of runs: one for each table or section of the paper, and lm-eval's long-context tasks."""

import functools
from collections.abc import Callable

from sbeval.errors import UserError
from sbeval.sweep.definition import SweepRun

ChosenLengths = tuple[int, ...] | None

PAPER_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
BABILONG_LENGTHS = (4096, 8192, 16384, 32768, 65536)
# tokens of the model's context length that are reserved for the answer after a prompt of the longest length
_RULER_ANSWER_TOKENS = 256
# Tasks state the lengths of their texts in tokens of another tokenizer, without instructions and examples. The model's
# `max_length` is this many times the stated length, so that prompts are not truncated.
_ROOM = 2
_INFINITEBENCH = tuple(f"infinitebench_{name}" for name in ("passkey", "number_string", "kv_retrieval"))
# Tasks whose prompts must not be truncated, since the answer may be anywhere in the text. Each entry has the name of
# the run, the tasks, and the numbers of tokens of the longest text and of an answer.
UNCUT = (
    ("graphwalks-128k", ("graphwalks_128k",), 131_072, 16_384),
    ("graphwalks-1m", ("graphwalks_1M",), 1_048_576, 16_384),
    ("infinitebench", _INFINITEBENCH, 131_072, 128),
)


def suite_runs(name: str, context_lengths: ChosenLengths) -> tuple[SweepRun, ...]:
    """Returns the runs of a suite. `context_lengths`, in tokens, replace the suite's own lengths.

    Raises:
        UserError: there is no such suite, or its lengths cannot be chosen.
    """
    if not isinstance(name, str) or name not in SUITES:
        raise UserError(f"Expected one of the suites {', '.join(sorted(SUITES))}, found {name!r}: name one of them.")
    return SUITES[name](context_lengths)


def _of_one_task(name: str, lengths: ChosenLengths) -> tuple[SweepRun, ...]:
    _check_no_lengths(name, lengths)
    return (SweepRun(name=name, tasks=(f"sb_paper_{name}",)),)


def _mmlu(lengths: ChosenLengths) -> tuple[SweepRun, ...]:
    """Returns the runs of the paper's table 3: one for each number of shots, since a run evaluates a task only once."""
    _check_no_lengths("mmlu", lengths)
    return tuple(SweepRun(name=f"mmlu-{shots}-shot", tasks=("sb_paper_mmlu",), num_fewshot=shots) for shots in (0, 5))


def _length(lengths: ChosenLengths) -> tuple[SweepRun, ...]:
    """Returns the runs of the paper's section 5.2 and appendix C.1.

    Each run scores every context length, so that differences between lengths are paired.
    """
    return tuple(
        SweepRun(
            name=f"{corpus}-{protocol}",
            tasks=(f"sb_paper_length_{corpus}_{protocol}",),
            context_lengths=lengths or PAPER_LENGTHS,
        )
        for corpus in ("wikitext", "pile")
        for protocol in ("rolling", "stream")
    )


def _ruler(lengths: ChosenLengths) -> tuple[SweepRun, ...]:
    fitting = {} if lengths is None else {"max_length": lengths[-1] + _RULER_ANSWER_TOKENS}
    return (SweepRun(name="ruler", tasks=("sb_paper_ruler",), context_lengths=lengths, model_args=fitting),)


def _long_context(lengths: ChosenLengths) -> tuple[SweepRun, ...]:
    """Returns the runs of lm-eval's long-context tasks.

    For BABILong, a context length selects a configuration of the data set. For both versions of LongBench it is the
    model's `max_length`, to which prompts are truncated; if no lengths are chosen, each version is one run. Prompts of
    GraphWalks and InfiniteBench are never truncated: each is one run, which is left out if the longest chosen length is
    shorter than its texts.
    """
    babilong = [
        SweepRun(
            name=f"babilong-{length // 1024}k",
            tasks=("babilong_longctx",),
            model_args={"max_length": _ROOM * length},
            metadata={"max_seq_lengths": f"{length // 1024}k"},
        )
        for length in _multiples_of_1024(lengths or BABILONG_LENGTHS)
    ]
    truncated = [
        SweepRun(
            name=name if length is None else f"{name}-{length}",
            tasks=(task,),
            model_args={} if length is None else {"max_length": length},
        )
        for name, task in (("longbench", "longbench"), ("longbench2", "longbench2"))
        for length in lengths or (None,)
    ]
    untruncated = [
        SweepRun(
            name=name,
            tasks=tasks,
            model_args={"max_length": _ROOM * text_tokens + answer_tokens, "truncation": "error"},
        )
        for name, tasks, text_tokens, answer_tokens in UNCUT
        if lengths is None or lengths[-1] >= text_tokens
    ]
    return (*babilong, *truncated, *untruncated)


def _multiples_of_1024(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if wrong := [length for length in lengths if length % 1024]:
        raise UserError(f"BABILong's context_lengths must be multiples of 1024 tokens, found {wrong}: change these.")
    return lengths


def _check_no_lengths(name: str, lengths: ChosenLengths) -> None:
    if lengths is not None:
        raise UserError(
            f"The suite paper-{name} has fixed prompt lengths: remove context_lengths ({list(lengths)}), or set "
            "max_length in model_args to truncate prompts."
        )


SUITES: dict[str, Callable[[ChosenLengths], tuple[SweepRun, ...]]] = {
    "paper-nlp": functools.partial(_of_one_task, "nlp"),
    "paper-mmlu": _mmlu,
    "paper-gsm8k": functools.partial(_of_one_task, "gsm8k"),
    "paper-appendix": functools.partial(_of_one_task, "appendix"),
    "paper-length": _length,
    "paper-ruler": _ruler,
    "long-context": _long_context,
}
