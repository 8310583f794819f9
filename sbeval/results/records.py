"""The records that a run writes into results files and a report reads: the contract of tasks, adapter and reports.

Metric keys are `<metric>@<context length, 7 digits>`, for instance `nll@0016384`, zero-padded because lm-eval sorts
names as text. lm-eval stores them as `<metric>@<length>,<filter>` in its results files.

Places in lm-eval's files:

- results file, `results.<task>`: the metrics; `<metric>_ci95@...` is [low, high]; `tokens@...` and `clusters@...` are
  counts; `position_nll` is a list of [first position, last position, NLL in nats, tokens], one for each bin, and
  `position_nll_ci95` ([low, high] or null) and `position_clusters` are lists over the same bins.
- results file, `configs.<task>.metadata.sbeval`: a `TaskRecord`.
- results file, `config.sbeval`: a `ModelRecord`.
- samples file, `nll@...` of one sample: a list of `ClusterSums` rows, from which paired differences are computed;
  `position_nll` of one sample: for every bin a list of [cluster, NLL in nats, tokens].

Missing is None or an absent key; never 0 or -1. Readers keep unknown fields, writers produce exactly these.
"""

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from sbeval.variables import METADATA_VARIABLE

SCHEMA = 1
HIDDEN = "***"
_SECRET = r"(?:(?:hf|hub|api|access|auth|use_auth|wandb)[_-])?(?:token|key|secret|password)"
_ASSIGNED = re.compile(rf"(?i)(?P<name>(?:^|(?<=[\s,{{\"'])|(?<=--)){_SECRET}\"?[=:]\s*)[^,\s}}]+")
USERINFO = re.compile(r"(?<=://)[^/@\s]+@")  # user name and password in an address
_OPTION = re.compile(rf"(?i)--{_SECRET}")

_KEY = re.compile(r"(?P<metric>[A-Za-z_][A-Za-z0-9_]*?)@(?P<length>[0-9]{1,30})")

IDENTICAL_TARGETS = ("fixed_target", "pairs", "riffled")
"""Protocols that score the same targets at every context length, so that only the context differs."""
FOUND, SAID_ABSENT, INVENTED = "found", "said_absent", "invented"
MARGIN_THERE, MARGIN_ABSENT = "none_margin_there", "none_margin_absent"
OF_ABSENT = (SAID_ABSENT, INVENTED, MARGIN_ABSENT)
"""Metrics of the samples of needle tasks whose key is not in the text."""
OF_PRESENT = (FOUND, MARGIN_THERE)
"""Metrics of the samples of such tasks whose key is in the text."""
RELATIVE_ERROR, CHANCE_RELATIVE_ERROR = "relative_error", "chance_relative_error"
"""Metrics of counts: the distance from the right count as a share of it, and that of the best answer without text."""
LABEL = "label"
"""Key of lm-eval's metadata that holds the model's name in reports."""


def metric_key(metric: str, context_length_tokens: int) -> str:
    """Returns the key of a metric at a context length: `metric_key("nll", 16384) == "nll@0016384"`."""
    return f"{metric}@{context_length_tokens:07d}"


def parse_metric_key(key: str) -> tuple[str, int] | None:
    """Splits a metric key, with or without lm-eval's ending `,filter`; None if it has no context length."""
    match = _KEY.fullmatch(key.partition(",")[0])
    return (match["metric"], int(match["length"])) if match else None


class ClusterSums(NamedTuple):
    """One sample's part of the sums of one source document ("cluster") at one context length.

    A document's sums are the sums of all rows with its `cluster`, over all samples.

    Attributes:
        cluster: the document.
        nll_nats: summed NLL of the scored targets, in nats.
        tokens: number of scored targets.
        words: words of the targets' original text, NaN if a target's words cannot be told.
        bytes: bytes of the targets' original text, NaN if a target's bytes cannot be told.
    """

    cluster: str
    nll_nats: float
    tokens: int
    words: float
    bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Builds the record from a results file. Fields that this version does not know are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: item for key, item in value.items() if key in known})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord(_Record):
    """Facts about one task of a run, stored in `configs.<task>.metadata.sbeval`.

    Attributes:
        schema: version of this contract.
        family: "perplexity", "ruler", "graded", "mrcr", "recall", "tally" or "span".
        corpus: name of the text source, None for generated text without one.
        corpus_sha256: hash of the corpus text as used.
        corpus_detail: further facts that identify the corpus, such as the interpreter's version for the standard
            library, and changes to its text as it was read, such as a removed byte order mark.
        protocol: "rolling", "stream", "sliding", "fixed_target", "position", "pairs", "riffled", or
            the generator's name.
        context: "document" or "stream": where a window's left context may come from, None if neither limits it.
        separator: token text between joined documents, None if nothing is joined.
        bos: "text", "window" or "hf".
        lengths: context lengths scored, in tokens, ascending.
        dropped_lengths: default lengths left out because corpus or model is shorter, ascending.
        targets_per_window: scored targets of a window if the protocol fixes their number, else None.
        room_tokens: with `fixed_target`, the smallest left context of the chosen targets, in tokens; else None.
        targets_sha256: hash of the positions of the scored tokens; two runs with equal hashes scored the same targets.
        strides: for each length (as text), new targets of a window if windows overlap, else None.
        longppl: evaluator, context lengths and thresholds that chose LongPPL's key tokens, None without LongPPL.
        own_document_share: for each length (as text), the share of targets whose whole left context is their own
            document.
        seen_documents: names of scored documents that the model was trained on; short documents cannot be recognised.
            None if its training left no record.
        uneven_documents: true if the scored documents differ so much in size that intervals are doubtful, else None.
        tokenizer_sha256: hash of the tokenizer.
        seed: seed of sampling and of the bootstrap.
        lm_eval_version: the lm-eval that ran the task; for RULER also the source of the wording.
        scripts: "nvidia" if RULER's prompts are filled and worded as in NVIDIA's scripts, else None.
        answer_prefix: whether the prompt contains the beginning of the answer; None if the task generates no answers or
            did not record it.
        too_long: what became of samples whose prompt did not fit a length: "leave_out" or "truncate"; None if such a
            length was left out for all samples, or if the task has no such samples.
        fitting_samples: for each length (as text), the number of samples scored there, if lengths or metrics may have
            different numbers of samples; else None.
        left_out_samples: with "leave_out", for each length (as text), the number of samples left out there; for MRCR
            with "truncate" too, since some turns of a conversation are never removed.
        samples_sha256: for each length (as text) at which samples were left out, a hash of the samples scored there.
            Numbers at two lengths are of the same samples only if these are equal.
        cut_samples: with "truncate", for each length (as text), the number of samples whose text lost its middle.
        absent: share of the samples of a needle task that ask for a key that is not in the text; None if all keys are.
        absent_samples: for each length (as text), the number of such samples.
        level: level of a graded task: "basic", "easy", "medium" or "hard"; else None.
        added_tokens: only with `rolling`, which scores these tokens as lm-eval does: the `prefix` and `suffix` (BOS,
            EOS) that the tokenizer adds around every document, after the BOS that is always the first input; None if it
            adds nothing.
    """

    schema: int = SCHEMA
    family: str
    corpus: str | None = None
    corpus_sha256: str | None = None
    corpus_detail: str | None = None
    protocol: str
    context: str | None = None
    separator: str | None = None
    bos: str | None = None
    lengths: list[int]
    dropped_lengths: list[int] = dataclasses.field(default_factory=list)
    targets_per_window: int | None = None
    room_tokens: int | None = None
    targets_sha256: str | None = None
    strides: dict[str, int] | None = None
    longppl: dict[str, Any] | None = None
    own_document_share: dict[str, float] | None = None
    seen_documents: list[str] | None = None
    uneven_documents: bool | None = None
    tokenizer_sha256: str | None = None
    seed: int | None = None
    lm_eval_version: str | None = None
    scripts: str | None = None
    answer_prefix: bool | None = None
    too_long: str | None = None
    fitting_samples: dict[str, int] | None = None
    left_out_samples: dict[str, int] | None = None
    samples_sha256: dict[str, str] | None = None
    cut_samples: dict[str, int] | None = None
    absent: float | None = None
    absent_samples: dict[str, int] | None = None
    level: str | None = None
    added_tokens: dict[str, list[str]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecord(_Record):
    """Facts about the evaluated model, stored in `config.sbeval` by the adapter's `get_model_info()`.

    Attributes:
        schema: version of this contract.
        name: short display name: the last part of the checkpoint's path or hub id.
        format: format of the checkpoint, such as "sbeval" or "huggingface:llama".
        checkpoint_sha256: hash over the weights' files, None for a hub id.
        inputs: parts of the checkpoint, its adapters and its tokenizer by name ("config.json", "peft: weights"), each
            with the beginning of its content hash or its revision; empty if the run did not record them.
        training_length_tokens: the original training length, None if unknown.
        declared_length_tokens: the longest context that the checkpoint's configuration declares, None if unknown.
        extended_from: name, hash and length of the parent checkpoint before context extension, else None.
        attention: "stickbreaking", "rope", "nope", "alibi", "nape", "fire", "forgetting", the second to fifth also with
            "-ssmax", "-entmax15" or "-asentmax"; or the model type of another project.
        sliding_window: window in tokens, None for full attention.
        remainder: what the remainder of stick-breaking attention adds to the output, as the model's configuration names
            it; None if unknown.
        head_norm: whether heads are normalised before the output projection, None if unknown.
        backend: lm-eval's model that answered, with a server's address ("hf", "local-completions at http://..."); None
            if it was `sb`.
        recipe: name of the training recipe, None if the checkpoint does not record it.
        training_seed: seed of the initial weights; runs of one recipe with different seeds are shown as one line.
        kernels: implementation of attention: "triton", "blockwise", "reference", "adasplash", "sdpa", ...
        rope_scaling: the RoPE scaling in force, in transformers' form; by type of layer if layers with a sliding window
            are scaled too; else None.
        extrapolation: the method of attention beyond the training length: `method` and its parameters in tokens by
            name, else None.
        skip_threshold: remaining stick below which older keys were skipped, None if nothing was skipped.
        unread: tensors of the checkpoint or its adapter that the model did not load, with the numbers of layers joined
            ("model.layers.2-3.mlp.up_proj.weight"): `allowed` by the user, and `declared` by the model's class, such as
            layers of multi-token prediction; None if it loaded all of them, or the run did not record it.
        dtype: parameter dtype such as "bfloat16".
        parameters: number of parameters.
        max_length: longest input in tokens that the run allowed.
        command: command line of the run, with secrets replaced; None if the model was not loaded by a command.
        versions: package name to version.
        gpu: device name, None on a CPU.
        peak_memory_bytes: peak of allocated device memory over the run, None on a CPU.
        tokens_per_second: input tokens per second of model time over the run.
        generated: number of `answers` of rank 0, and how many of them were `cut` at their budget; whether prompts were
            `chat`; tokens of thinking, and how many answers had their thinking cut at its budget or ended inside it.
            Answers from a response cache count too, except those that an earlier version stored.
        thinking_tokens: largest number of thinking tokens before each answer, None if thinking was not switched on.
        self_test: result of the check whether batches, padding and caches change the model's logits, on a few tokens
            before the first answer and on the run's own batches since: the ways to run the model with their `checks`,
            which of them are used, and a `sentence`; `untested` says why there are none. None for this project's models
            and for those with an encoder.
        added_tokens: tokens that the tokenizer adds to a text: a `prefix` and a `suffix`, such as BOS and EOS. A
            `sentence` says where the model reads them. None if the tokenizer adds nothing.
        prepared: changes to the loaded model, such as fused kernels: names of the changes that were `kept`, and
            `notes`, a sentence for each change that altered the model's logits and was undone. None if the run did not
            record it.
        cache: the KV cache through which targets were scored and answers generated: its name as in `cache=...`,
            `backend` with version, `bits`, `group` and `residual_length_tokens` if it is quantized, `function_sha256`,
            a hash of the file of a user's function, `chunk_tokens` read at once behind the context, the
            `bytes_per_token` that a token behind all sliding windows adds to it, and `full_bytes_per_token` to a full
            cache, both measured between the two lengths `bytes_at_tokens` and None if the windows are too long for
            that, the `checks` of its test, and `difference_nats`, how much the mean NLL of the test's text is higher
            than without a cache. None if targets were scored without a cache.
    """

    schema: int = SCHEMA
    name: str
    format: str
    checkpoint_sha256: str | None = None
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    training_length_tokens: int | None = None
    declared_length_tokens: int | None = None
    extended_from: dict[str, Any] | None = None
    attention: str | None = None
    sliding_window: int | None = None
    remainder: str | None = None
    head_norm: bool | None = None
    backend: str | None = None
    recipe: str | None = None
    training_seed: int | None = None
    kernels: str | None = None
    rope_scaling: dict[str, Any] | None = None
    extrapolation: dict[str, Any] | None = None
    skip_threshold: float | None = None
    unread: dict[str, list[str]] | None = None
    dtype: str | None = None
    parameters: int | None = None
    max_length: int | None = None
    command: str | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu: str | None = None
    peak_memory_bytes: int | None = None
    tokens_per_second: float | None = None
    generated: dict[str, Any] | None = None
    thinking_tokens: int | None = None
    self_test: dict[str, Any] | None = None
    added_tokens: dict[str, Any] | None = None
    prepared: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None


def recorded_command(arguments: Sequence[str] | None = None) -> str:
    """Returns a command line, by default this process's, quoted for a shell, with secrets replaced by `***`.

    `SBEVAL_METADATA`, if it is set, stands before this process's command, since the tasks read it.
    """
    settings = os.environ.get(METADATA_VARIABLE) if arguments is None else None
    program, *rest = sys.argv if arguments is None else arguments
    path = Path(program)
    command = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name or "python"]
    hide_next = False
    for argument in rest:
        command.append(HIDDEN if hide_next else _without_secrets(argument))
        hide_next = _OPTION.fullmatch(argument) is not None
    before = f"{METADATA_VARIABLE}={shlex.quote(_without_secrets(settings))} " if settings else ""
    return before + " ".join(word if word == HIDDEN else shlex.quote(word) for word in command)


def _without_secrets(text: str) -> str:
    return USERINFO.sub("", _ASSIGNED.sub(rf"\g<name>{HIDDEN}", text))
