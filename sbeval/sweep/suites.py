"""The sets of runs that have a name: the paper's suite, one table or section each, and lm-eval's long-context tasks."""

import functools
from collections.abc import Callable

from sbeval.errors import UserError
from sbeval.sweep.definition import SweepRun

AskedLengths = tuple[int, ...] | None

PAPER_LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
BABILONG_LENGTHS = (4096, 8192, 16384, 32768, 65536)
# room for the answer behind a prompt of the longest length
_RULER_ANSWER_TOKENS = 256
# others count with tokenizers of their own, and without instructions and examples; a prompt must not be cut for that
_ROOM = 2
_INFINITEBENCH = tuple(f"infinitebench_{name}" for name in ("passkey", "number_string", "kv_retrieval"))
# tasks whose answer may lie anywhere in their text: name of the run, tasks, tokens of a longest text and of an answer
UNCUT = (
    ("graphwalks-128k", ("graphwalks_128k",), 131_072, 16_384),
    ("graphwalks-1m", ("graphwalks_1M",), 1_048_576, 16_384),
    ("infinitebench", _INFINITEBENCH, 131_072, 128),
)


def suite_runs(name: str, context_lengths: AskedLengths) -> tuple[SweepRun, ...]:
    """Returns the runs of a suite, with other lengths in tokens than its own where some are given.

    Raises:
        UserError: no suite of that name, or one without lengths to choose.
    """
    if not isinstance(name, str) or name not in SUITES:
        raise UserError(f"Expected one of the suites {', '.join(sorted(SUITES))}, found {name!r}: name one of them.")
    return SUITES[name](context_lengths)


def _of_one_task(name: str, lengths: AskedLengths) -> tuple[SweepRun, ...]:
    _no_lengths(name, lengths)
    return (SweepRun(name=name, tasks=(f"sb_paper_{name}",)),)


def _mmlu(lengths: AskedLengths) -> tuple[SweepRun, ...]:
    """Table 3. lm-eval keeps a task once a run, so each number of shots is a run."""
    _no_lengths("mmlu", lengths)
    return tuple(SweepRun(name=f"mmlu-{shots}-shot", tasks=("sb_paper_mmlu",), num_fewshot=shots) for shots in (0, 5))


def _length(lengths: AskedLengths) -> tuple[SweepRun, ...]:
    """Section 5.2 and appendix C.1; a run scores every length, so that lengths are paired."""
    return tuple(
        SweepRun(
            name=f"{corpus}-{protocol}",
            tasks=(f"sb_paper_length_{corpus}_{protocol}",),
            context_lengths=lengths or PAPER_LENGTHS,
        )
        for corpus in ("wikitext", "pile")
        for protocol in ("rolling", "stream")
    )


def _ruler(lengths: AskedLengths) -> tuple[SweepRun, ...]:
    fitting = {} if lengths is None else {"max_length": lengths[-1] + _RULER_ANSWER_TOKENS}
    return (SweepRun(name="ruler", tasks=("sb_paper_ruler",), context_lengths=lengths, model_args=fitting),)


def _long_context(lengths: AskedLengths) -> tuple[SweepRun, ...]:
    """BABILong's length is a configuration of its dataset; LongBench's, both versions', is what the model may read.

    Without lengths LongBench is one run a version, at the length the model was given. GraphWalks and InfiniteBench are
    never cut: each is one run, with lengths given only if the longest reaches its texts.
    """
    babilong = [
        SweepRun(
            name=f"babilong-{length // 1024}k",
            tasks=("babilong_longctx",),
            model_args={"max_length": _ROOM * length},
            metadata={"max_seq_lengths": f"{length // 1024}k"},
        )
        for length in _thousands(lengths or BABILONG_LENGTHS)
    ]
    cut = [
        SweepRun(
            name=name if length is None else f"{name}-{length}",
            tasks=(task,),
            model_args={} if length is None else {"max_length": length},
        )
        for name, task in (("longbench", "longbench"), ("longbench2", "longbench2"))
        for length in lengths or (None,)
    ]
    whole = [
        SweepRun(
            name=name,
            tasks=tasks,
            model_args={"max_length": _ROOM * text_tokens + answer_tokens, "truncation": "error"},
        )
        for name, tasks, text_tokens, answer_tokens in UNCUT
        if lengths is None or lengths[-1] >= text_tokens
    ]
    return (*babilong, *cut, *whole)


def _thousands(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if odd := [length for length in lengths if length % 1024]:
        raise UserError(f"Expected lengths of BABILong in whole multiples of 1024 tokens, found {odd}.")
    return lengths


def _no_lengths(name: str, lengths: AskedLengths) -> None:
    if lengths is not None:
        raise UserError(
            f"Expected no context_lengths for {name}, whose prompts have the lengths they have, found {list(lengths)}: "
            "leave them out, or set max_length in model_args."
        )


SUITES: dict[str, Callable[[AskedLengths], tuple[SweepRun, ...]]] = {
    "paper-nlp": functools.partial(_of_one_task, "nlp"),
    "paper-mmlu": _mmlu,
    "paper-gsm8k": functools.partial(_of_one_task, "gsm8k"),
    "paper-appendix": functools.partial(_of_one_task, "appendix"),
    "paper-length": _length,
    "paper-ruler": _ruler,
    "long-context": _long_context,
}
