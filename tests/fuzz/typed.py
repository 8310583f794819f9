"""What users type: commands, their options in any combination, the values of each, and environment variables.

Each runs in a process forked from this one, which has everything imported. It is good where it ends with 0 (equal), or
with 1 and a last line that says why, or with 2 and a parser's usage; and never shows a traceback.
"""

import contextlib
import functools
import importlib
import json
import logging
import os
import resource
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import lm_eval.__main__
import torch

from sbeval.__main__ import main
from sbeval.demo.evaluation import shipped_checkpoints
from sbeval.errors import UserError
from sbeval.model_adapters.options import AdapterOptions
from sbeval.tasks.packaged import definitions
from sbeval.tasks.user_options import options_classes
from tests.fuzz import results
from tests.fuzz.mutations import VALUES, changed_bytes

NAMES = ["run", "lm_eval", "environment", "sweep", "report", "inspect", "convert", "train", "extend"]
# what a command needs once it runs, so that a case costs no import
_IMPORTED = ("sbeval.model_adapters.lm", "sbeval.reports.build", "sbeval.tasks.ruler.niah", "sbeval.tasks.recall.mqrar")
CHECKPOINT = str(shipped_checkpoints()[1])
HARDER = ("sb_text_pairs", "sb_text_riffled", "sb_association", "sb_turns_forced", "sb_longbench2_short")
TASKS = (
    *("sb_flipflop", "sb_niah_single_1", "sb_copy_phrase", "sb_text_stream", "sb_text_fixed_target", "sb_span"),
    *HARDER,
)
# words by what they are, then what is likely to be typed behind an option; options of evaluations come first
TABLE = {
    line.split()[0]: line.split()[1:]
    for line in """
        ANYTHING nope nope* * [ sb_text_stream[1] sb_*_stream , a,,b a=b = a= =a {} { ' 1e22 1e400 -1 0 0.5 1,2 1;2 nan
        ANYTHING_ELSE inf None True true null ~ ~nobodyxx/a ./nope /dev/null/such nope/nope a/b/c -- - . folder text.txt
        OTHERS file.yaml pipe auto auto:0 cpu cuda:7 cpu:x meta 4K 99999999999999999999 \u0661 \x1b[31m [[1]]
        ARGUMENTS dtype max_length tokenizer revision subfolder peft delta trust_remote_code device_map add_bos_token
        OTHER_ARGUMENTS parallelize device batch_size max_batch_size softmax_dtype prefix_token_id autogptq gguf_file
        ODD_ARGUMENTS backend chat_template_args enable_thinking use_fast_tokenizer logits_cache pretraned
        PROCESSES WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS ACCELERATE_USE_CPU
        FOLDERS SBEVAL_CACHE HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HOME TMPDIR XDG_CACHE_HOME CUDA_VISIBLE_DEVICES
        TERMINAL LOGLEVEL LMEVAL_LOG_LEVEL HF_TOKEN COLUMNS LANG TERM TZ NO_COLOR PYTHONIOENCODING SBEVAL_NO_AUTOLOAD
        LIBRARIES TOKENIZERS_PARALLELISM TRANSFORMERS_VERBOSITY PYTORCH_ALLOC_CONF
        limit 1 2 0.5 0.01
        seed 1 0,1,2,3 None 1,2 0,None,8,52
        num_fewshot 0 2 -1
        batch_size 1 4 auto auto:2
        max_batch_size 1 4 -1
        device cpu cuda cuda:0 mps
        verbosity INFO debug ERROR
        config file.yaml text.txt
        include_path folder .
        output_path out out/a.json text.txt
        use_cache answers out/answers text.txt
        system_instruction Answer. %s{0}
        fewshot_as_multiturn true false
        samples {"sb_flipflop":[0]} {"sb_flipflop":[9]} {"nope":[1]} {"sb_flipflop":"x"} {"sb_flipflop":[-1]}
        gen_kwargs temperature=0 do_sample=True max_gen_toks=-1 max_gen_toks=x until=1 {"until":[]} nope=1 num_beams=2
        cache_requests true refresh delete
        apply_chat_template true default
        wandb_args nope=1 mode=nope
        hf_hub_log_args nope=1 push_results_to_hub=True hub_results_org=1 token=1 output_path=x
        trackio_args nope=1
        metadata seed=1 context_lengths=[32] {"num_samples":2}
        model_args dtype=float32 max_length=64 {"kernels":"reference"}
        model-args dtype=float32 max_length=64 {"kernels":"reference"}
        tasks sb_flipflop sb_span sb_niah sb_paper_nlp
        context-lengths 32 32,64
        suite paper-length paper-nlp long-context
        run stream rope/stream
        ray local 127.0.0.1:1
        follow folder out
        label demo-rope=x demo-sb=demo-rope
        baseline demo-rope x
        only demo-rope sb_* hellaswag
        gate file.yaml text.txt
        least-effect 0.01 1 -1
        hub-results out hub
        hub-dataset hellaswag=a/b
        axis tokens training declared
        within 0 0.01 1 -1
        paper paper out folder text.txt
        figure * *nll* nope [
        memory 80GiB 24GB 1
        lengths 64,128 32
        dtype float32 bfloat16
        kv-expand tile interleave
        data text.txt folder
        text text.txt folder
        tokenizer folder nope
        set optimization.learning_rate=1 seed=2 model.hidden_size=0 model.attention=nope data.seed=x
        max-seconds 1 0
        split paragraph 8 ( [
        context 32 128 0
        steps 1 2 0
        batch-tokens 64 128
        micro-batch-tokens 64 32
        learning-rate 0.001 1e-3 -1
        rope-scaling dynamic:4 yarn:2
        """.strip().splitlines()
}
EVALUATING = [*TABLE][[*TABLE].index("limit") : [*TABLE].index("metadata")]
TYPED = (
    *(*TABLE["ANYTHING"], *TABLE["ANYTHING_ELSE"], *TABLE["OTHERS"]),
    *(shown for value in VALUES if "\0" not in (shown := str(value)) and "etc" not in shown and shown.isprintable()),
)
METADATA = sorted({name for kind in options_classes() for name in kind.model_fields})
MODEL_ARGS = (*AdapterOptions.model_fields, *TABLE["ARGUMENTS"], *TABLE["OTHER_ARGUMENTS"], *TABLE["ODD_ARGUMENTS"])
PAIR = {"context": "Simple is better than complex. \ud83d\ude00 " * 9, "target": "Now is better than never. \u0301"}
QUESTION = {
    **{"context": "Simple is better. " * 99, "question": "What is better?", "answer": "A", "length": "short"},
    **{f"choice_{letter}": letter * 3 for letter in "ABCD"},
}
VARIABLES = (*TABLE["PROCESSES"], *TABLE["FOLDERS"], *TABLE["TERMINAL"], *TABLE["LIBRARIES"])
FLAGS = ("log_samples", "write_out", "show_config", "predict_only", "check_integrity", "trust_remote_code")
# of other commands: how they begin, their options with values, and those without
OTHER: dict[str, tuple[Sequence[str], str, Sequence[str]]] = {
    "sweep": (
        ("--suite paper-length {checkpoint} -o out", "file.yaml", "{checkpoint} -o out"),
        "suite context-lengths limit model-args metadata run ray follow",
        ("--replace",),
    ),
    "report": (
        (*["{results} --compare demo-rope demo-sb"] * 5, "{results} -o out"),
        "label baseline only title least-effect gate hub-results hub-dataset axis within paper figure",
        ("--fail-if-worse", "--replace"),
    ),
    "inspect": (
        ("{checkpoint}", "{checkpoint} --tasks sb_flipflop --limit 2"),
        "memory lengths dtype kv-expand tasks metadata model_args limit",
        ("--json",),
    ),
    "convert": (("{checkpoint} out", "folder out", "nope out"), "kv-expand dtype", ("--replace",)),
    "train": (
        ("demo_rope --data folder --out out", "--text text.txt --max-seconds 1 --out out", "file.yaml --out out"),
        "data set text tokenizer split text-field max-seconds",
        ("--allow-repeat",),
    ),
    "extend": (
        ("{checkpoint} --data text.txt --context 64 --out out --max-seconds 1 --batch-tokens 64 --steps 1",),
        "data context steps batch-tokens micro-batch-tokens learning-rate rope-scaling",
        ("--allow-repeat",),
    ),
}


class Typed(NamedTuple):
    """A command's words, and the environment variables that differ."""

    words: list[str]
    environment: Mapping[str, str]


@functools.cache
def _results() -> str:
    for module in _IMPORTED:
        importlib.import_module(module)
    return str(results.undamaged()[0])


def _value(rng: Random, likely: Sequence[str] = ()) -> str:
    return rng.choice(likely) if likely and rng.random() < 0.7 else rng.choice(TYPED)


def _pairs(rng: Random, usual: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns a mapping as it is typed: JSON or text, the usual keys and perhaps others with any value."""
    pairs: dict[str, Any] = dict(usual)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        name = rng.choice(names) if rng.random() < 0.9 else rng.choice(TYPED)
        likely = (*range(-1, 5), 16, 10**9, 2**63, 0.5, True, None, [1], [], {}, "text", "stream", "noise", "paragraph")
        pairs[name] = rng.choice(likely) if rng.random() < 0.7 else rng.choice(TYPED)
    if rng.random() < 0.7:
        return json.dumps(pairs)
    return ",".join(f"{name}={value}" for name, value in pairs.items())


def _evaluation(rng: Random) -> list[str]:
    chosen = rng.sample(TASKS, rng.choice([1, 1, 1, 2])) if rng.random() < 0.8 else [_value(rng, [*definitions()])]
    length = 512 if {"sb_niah_single_1", *HARDER[1:]} & {*chosen} else 32
    usual = {
        "context_lengths": [length],
        "num_samples": 2,
        "data_path": f"text.{'jsonl' if HARDER[0] in chosen else 'txt'}",
    }
    if HARDER[1] in chosen:
        usual |= {"riffled_documents": 2, "piece_tokens": 16, "split": "paragraph"}
    if HARDER[4] in chosen:
        usual |= {"longbench2": "questions.jsonl"}
    given = {
        "tasks": ",".join(chosen),
        "model_args": _pairs(rng, {"pretrained": CHECKPOINT, "max_length": 640}, MODEL_ARGS),
        "metadata": _pairs(rng, usual, METADATA),
        "limit": "1",
    }
    for name in rng.sample(EVALUATING, rng.choice([0, 1, 1, 2, 3])):
        given[name] = _value(rng, TABLE[name])
    if rng.random() < 0.1 or "samples" in given:
        del given[rng.choice([*given]) if "samples" not in given else "limit"]
    flags = [f"--{name}" for name in rng.sample(FLAGS, rng.choice([0, 0, 0, 1]))]
    return [word for name, value in given.items() for word in (f"--{name}", value)] + flags


def typed(what: str, rng: Random) -> Typed:
    if what in OTHER:
        usual, options, flags = OTHER[what]
        words = [what, *rng.choice(usual).split()]
        words = [word.format(checkpoint=CHECKPOINT, results=_results()) for word in words]
        for name in rng.sample(options.split(), rng.choice([0, 1, 1, 2])):
            words += [f"--{name}", _value(rng, TABLE.get(name, ()))]
        if rng.random() < 0.2:
            words[rng.randrange(1, len(words))] = rng.choice(TYPED)
        words += ["--dry-run"] if what == "sweep" else []  # also where it was what another word took the place of
        return Typed([*words, *rng.sample(flags, rng.choice([0, 0, 1]))], {})
    start = ["lm_eval", "--model", "sb"] if what == "lm_eval" else ["run"]
    if what != "environment":
        return Typed([*start, *_evaluation(rng)], {})
    words = f"--tasks sb_flipflop --limit 1 --model_args pretrained={CHECKPOINT} --metadata".split()
    likely = ("0", "1", "2", "-1", "abc", "", "localhost", "pipe", "text.txt", "folder")
    environment = {name: _value(rng, likely) for name in rng.sample(VARIABLES, rng.choice([1, 1, 2]))}
    return Typed([*start, *words, '{"context_lengths":[32],"num_samples":2}'], environment)


def fuzz(what: str, rng: Random, folder: Path) -> str:
    """Types one command in a folder with a few things to name."""
    _results()
    command = typed(what, rng)
    lines = "Simple is better than complex. Now is better than never.\n" * 200
    (folder / "text.txt").write_text("\n".join([lines] * 3))
    for name, line in (("text", PAIR), ("questions", QUESTION)):
        content = (json.dumps(line) + "\n").encode() * 25
        (folder / f"{name}.jsonl").write_bytes(changed_bytes(content, rng) if rng.random() < 0.5 else content)
    (folder / "folder").mkdir()
    (folder / "file.yaml").write_text("seed: 1\n")
    os.mkfifo(folder / "pipe")
    shown = shlex.join([*(f"{name}={value}" for name, value in command.environment.items()), *command.words])
    try:
        code, said = _ended(command, folder)
    except BaseException as error:
        error.add_note(shown)
        raise
    last = said.strip().splitlines()[-1:]
    if "Traceback" in said or code not in (0, 1, 2) or (code and not last) or (code == 2 and "sage:" not in said):
        raise RuntimeError(f"{shown}\nended with {code}: {said[-3000:]}")
    if code:
        raise UserError(f"{shown}: {last[0]}")
    return "equal"


def _ended(command: Typed, folder: Path) -> tuple[int, str]:
    """Returns the exit code of a command, and what it said."""
    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        waited, child = False, os.fork()
        if child == 0:
            _run(command, folder, said.fileno())
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            waited = True
        finally:
            with contextlib.suppress(ProcessLookupError):  # processes that it started, and itself where it goes on
                os.killpg(child, signal.SIGKILL)
            if not waited:
                os.waitpid(child, 0)
        said.seek(0)
        return code, said.read().decode(errors="replace")


def _run(command: Typed, folder: Path, said: int) -> None:
    """Runs a command in a process that has just been forked, and ends it."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        if command.words[0] == "report":  # what draws images reserves more than it uses
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.environ.update({"SBEVAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HOME": str(folder)})
        os.environ.update(command.environment)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (said, 1), (said, 2)):
            os.dup2(source, target)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        logging.getLogger().handlers.clear()
        plain = command.words[0] == "lm_eval"
        for name, absent in (("is_available", False), ("device_count", 0)):  # a forked process cannot begin to use them
            setattr(torch.cuda, name, lambda absent=absent: absent)
        sys.argv[:] = command.words if plain else ["sbeval", *command.words]
        lm_eval.__main__.cli_evaluate() if plain else main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except UserError as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
