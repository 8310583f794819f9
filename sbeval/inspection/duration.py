"""How long tasks take: by the tokens a second of an earlier run, or by running some of their documents here."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.foreign_files import fits, read_json_object, usable_number
from sbeval.inspection.sizes import Sizes
from sbeval.inspection.work import Encode, ShareWindows, TaskWork, count_work
from sbeval.results.records import ModelRecord

SAMPLE_TOKENS = {"cpu": 2 * 8192, "cuda": 4 * 65536}
"""Tokens of each task that are run at least: some full batches."""
_LEAST_DOCUMENTS = 2
# each window of these ends at the same target, so that tokens grow with the length
_ONE_WINDOW_A_LENGTH = ("fixed_target",)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """An estimate.

    Attributes:
        source: where the throughput comes from.
        model_seconds: of each task, in the model.
        loading_seconds: to load the model, None where it was not loaded.
        measuring_seconds: what finding this out took in the model, None where nothing was run.
    """

    source: str
    model_seconds: Mapping[str, float]
    loading_seconds: float | None = None
    measuring_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds in the model, over all tasks."""
        return sum(self.model_seconds.values())


def operations(sizes: Sizes, tokens: int, *, attention: bool) -> float:
    """Returns the floating point operations of reading one window.

    Args:
        sizes: of the model.
        tokens: of the window.
        attention: whether a token attends to all before it; skipped keys cost nothing.
    """
    products = 2 * (sizes.parameters - sizes.other_embedding_parameters - sizes.idle_parameters) * tokens
    seen = sum(min(tokens, window or tokens) for window in sizes.key_windows) / 2
    return products + (4 * sizes.heads * sizes.head_dim * seen * tokens if attention else 0)


def by_results(file: Path, works: Sequence[TaskWork], sizes: Sizes) -> Duration:
    """Estimates by the tokens a second that an evaluation run recorded.

    For windows of other lengths than that run's, time is taken to grow with their operations; where it skipped keys,
    attention is taken to cost the same for every token.

    Args:
        file: a results file of lm-eval with the model `sb`.
        works: what is to be run.
        sizes: of the model.

    Raises:
        UserError: the file holds no results, records no tokens a second, or is of a model of another size.
    """
    results = read_json_object(file, "a results file of lm-eval")
    config = results.get("config")
    recorded = config.get("sbeval") if isinstance(config, dict) else None
    try:
        record = ModelRecord.from_json(recorded if isinstance(recorded, dict) else {})
    except TypeError:
        record = None
    rate = usable_number(record.tokens_per_second) if record else None
    if record is None or not rate or rate <= 0:
        raise UserError(
            f"Expected a results file of the model sb with its tokens a second at {str(file)!r}, found none in it: "
            "name another with --measured, or have some documents run with --measure."
        )
    if record.parameters != sizes.parameters:
        raise UserError(
            f"Expected results of a model of {sizes.parameters} parameters at {str(file)!r}, found one of "
            f"{record.parameters}: name results of this checkpoint or of one of its size, or use --measure."
        )
    whole = record.skip_threshold is None
    lengths = _token_shares(results)
    own = sum(share * operations(sizes, length, attention=whole) / length for length, share in lengths.items())

    def seconds(work: TaskWork) -> float:
        if not lengths:
            return work.tokens / rate
        asked = (count * operations(sizes, piece.tokens, attention=whole) for piece, count in work.pieces.items())
        return sum(asked) / own / rate

    where = record.gpu or "a CPU"
    return Duration(
        source=f"{rate:,.0f} tokens a second on {where} in {record.dtype}, which {file} recorded for {record.name}",
        model_seconds={work.task: seconds(work) for work in works},
    )


def _token_shares(results: Mapping[str, Any]) -> dict[int, float]:
    """Returns which share of a run's tokens was read in windows of which length, as far as its tasks say."""
    tokens: dict[int, float] = {}
    configs = results.get("configs")
    for config in configs.values() if isinstance(configs, dict) else ():
        metadata = config.get("metadata") if isinstance(config, dict) else None
        task = metadata.get("sbeval") if isinstance(metadata, dict) else None
        if not isinstance(task, dict) or not fits(task.get("lengths"), list[int]):
            continue
        one_each = task.get("protocol") in _ONE_WINDOW_A_LENGTH or task.get("family") != "perplexity"
        for length in task["lengths"]:
            if length > 0:
                tokens[length] = tokens.get(length, 0.0) + (length if one_each else max(task["lengths"]))
    total = sum(tokens.values())
    return {length: count / total for length, count in tokens.items()}


def by_running(
    tasks: Mapping[str, Any], arguments: Mapping[str, Any], device: str, encode: Encode, share: ShareWindows
) -> Duration:
    """Estimates by running some documents of every task with the model `sb`.

    The shortest requests are run before, since the first ones of a process compile kernels; a run pays that once too.

    Args:
        tasks: lm-eval's tasks by name, their requests made.
        arguments: of the model.
        device: "cpu" or "cuda".
        encode: from texts to numbers of tokens.
        share: see `ShareWindows`.
    """
    from lm_eval.api.registry import get_model

    started = time.perf_counter()
    lm = get_model("sb").create_from_arg_obj(
        dict(arguments), {"batch_size": "auto", "max_batch_size": None, "device": device}
    )
    loading = time.perf_counter() - started
    model_seconds, ran = {}, 0
    started = time.perf_counter()
    for name, task in tasks.items():
        chosen = _sample(name, task.instances, SAMPLE_TOKENS[device], encode, share)
        whole, sample = (count_work(name, instances, encode, share) for instances in (task.instances, chosen))
        first = _seconds(lm, _warm_up(name, chosen, encode, share))
        spent = _seconds(lm, chosen)
        ran += sample.documents
        model_seconds[name] = first + spent * whole.tokens / max(1, sample.tokens)
    return Duration(
        source=f"a measurement on this machine's {device}, of {ran} documents",
        model_seconds=model_seconds,
        loading_seconds=loading,
        measuring_seconds=time.perf_counter() - started,
    )


def _sample(name: str, instances: Sequence[Any], least_tokens: int, encode: Encode, share: ShareWindows) -> list[Any]:
    """Returns all requests of some documents, which lie evenly among all."""
    documents = list(dict.fromkeys(instance.doc_id for instance in instances))
    of_first = count_work(name, [one for one in instances if one.doc_id == documents[0]], encode, share).tokens
    wanted = min(len(documents), max(_LEAST_DOCUMENTS, -(-least_tokens // max(1, of_first))))
    kept = {documents[number * len(documents) // wanted] for number in range(wanted)}
    return [instance for instance in instances if instance.doc_id in kept]


def _warm_up(name: str, instances: Sequence[Any], encode: Encode, share: ShareWindows) -> list[Any]:
    """Returns the shortest request of each type."""
    shortest: dict[str, tuple[int, Any]] = {}
    for instance in instances:
        tokens = count_work(name, [instance], encode, share).tokens
        if instance.request_type not in shortest or tokens < shortest[instance.request_type][0]:
            shortest[instance.request_type] = tokens, instance
    return [instance for _, instance in shortest.values()]


def _seconds(lm: Any, instances: Sequence[Any]) -> float:
    """Returns how long a model takes for some requests."""
    started = time.perf_counter()
    for kind in dict.fromkeys(instance.request_type for instance in instances):
        getattr(lm, kind)([instance for instance in instances if instance.request_type == kind])
    return time.perf_counter() - started
