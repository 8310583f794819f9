"""What was found, as text for a reader and as JSON for a script."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from sbeval.inspection.description import Description
from sbeval.inspection.duration import Duration
from sbeval.inspection.memory import Needs
from sbeval.inspection.sizes import Sizes
from sbeval.inspection.work import TaskWork
from sbeval.results.digits import time_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much memory there is, and how far it reaches.

    Attributes:
        place: what has it.
        device: "cuda" or "cpu".
        memory_bytes: of it.
        longest_window_tokens: one window alone that is scored; learned positions end it too.
        longest_text_tokens: a prompt and its answer, alone.
    """

    place: str
    device: str
    memory_bytes: int
    longest_window_tokens: int
    longest_text_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """All that was found.

    Attributes:
        needs: memory beside the weights, by length; None where the sizes are not known.
        work: of each task, None where none was asked for.
        duration: None where no throughput was asked for.
        preparing_seconds: what imports, tasks and their requests took here, as they do in a run.
    """

    description: Description
    needs: Sequence[Needs] | None
    room: Room | None
    work: Sequence[TaskWork] | None = None
    duration: Duration | None = None
    preparing_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns all of it, JSON-ready; what is not known is null."""
        found = self.description
        return {
            "checkpoint": {
                **dataclasses.asdict(found),
                "told_by": list(found.told_by),
                "problems": list(found.problems),
            },
            "memory": {
                "room": dataclasses.asdict(self.room) if self.room else None,
                "needs": [dataclasses.asdict(one) for one in self.needs] if self.needs is not None else None,
            },
            "tasks": None if self.work is None else [_task_json(one, self.duration) for one in self.work],
            "estimate": None
            if self.duration is None
            else {
                **dataclasses.asdict(self.duration),
                "seconds": self.duration.seconds,
                "preparing_seconds": self.preparing_seconds,
            },
        }

    def to_text(self) -> str:
        """Returns it as lines."""
        lines = _description_lines(self.description)
        if self.needs is not None:
            lines += ["", *_memory_lines(self.needs, self.room)]
        if self.work is not None:
            lines += ["", *_work_lines(self.work, self.duration, self.preparing_seconds)]
        return "\n".join(lines)


def _task_json(work: TaskWork, duration: Duration | None) -> dict[str, Any]:
    return {
        "task": work.task,
        "documents": work.documents,
        "requests": work.requests,
        "tokens": work.tokens,
        "new_tokens_at_most": work.new_tokens,
        "pieces": [{**piece._asdict(), "count": count} for piece, count in sorted(work.pieces.items())],
        "seconds": None if duration is None else duration.model_seconds[work.task],
    }


def _description_lines(found: Description) -> list[str]:
    sizes = found.sizes
    lines = [found.folder]
    rows = {
        "format": f"{found.format or 'cannot be loaded'}; recognised by {', '.join(found.told_by)}",
        "attention": found.attention,
        "": ", ".join(f"{name} {_value(value)}" for name, value in found.details.items()) or None,
        "sizes": None if sizes is None else _sizes_text(sizes),
        "weights": None
        if sizes is None
        else f"{sizes.parameters:,} parameters, {bytes_text(sizes.weight_bytes)} in {found.dtype}",
        "training length": f"{found.training_length_tokens:,} tokens, from {found.training_length_from}"
        if found.training_length_tokens
        else "not stated: give training_length=... in --model_args"
        if found.format
        else None,
        "learned positions": f"{found.learned_positions:,}, and no input is longer"
        if found.learned_positions
        else None,
        "RoPE": ", ".join(f"{name} {_value(value)}" for name, value in found.rope.items()) if found.rope else None,
        "extended from": None
        if found.extended_from is None
        else ", ".join(f"{name} {_value(value)}" for name, value in found.extended_from.items()),
        "tokenizer": None
        if found.tokenizer is None
        else f"{found.tokenizer.kind}, {found.tokenizer.tokens:,} tokens, "
        f"{'adds' if found.tokenizer.adds_bos else 'adds no'} BOS, sha256 {found.tokenizer.sha256[:12]}",
    }
    lines += [f"  {name:<18}{text}" for name, text in rows.items() if text]
    lines += [f"  {'missing or wrong':<18}{problem}" for problem in found.problems]
    return (
        lines
        if found.problems
        else [*lines, f"  {'missing or wrong':<18}nothing: {found.tensors} tensors, all in place"]
    )


def _sizes_text(sizes: Sizes) -> str:
    heads = f"{sizes.heads} heads of {sizes.head_dim}"
    if sizes.key_value_heads != sizes.heads:
        heads += f", {sizes.key_value_heads} of keys"
    of_experts = f"{sizes.chosen_experts} experts a token of {sizes.expert_size:,}" if sizes.chosen_experts else ""
    of_mlp = f"MLP of {sizes.inner_size:,}" if sizes.inner_size else ""
    inner = " and ".join(filter(None, (of_mlp, of_experts)))
    gated = "gated " if sizes.gated else ""
    return f"{sizes.layers} layers, width {sizes.hidden_size:,}, {heads}, {gated}{inner}, {sizes.vocabulary:,} tokens"


def _memory_lines(needs: Sequence[Needs], room: Room | None) -> list[str]:
    columns = ("tokens", "one window", "fixed_target", "full batch", "generation", "each text more")
    rows: list[tuple[str, ...]] = [columns]
    rows += [
        (
            f"{one.length_tokens:,}",
            *map(bytes_text, (one.all_targets, one.last_targets, one.batch, one.generation, one.further_text)),
        )
        for one in needs
    ]
    lines = [
        "Memory beside the weights: one window of rolling, stream, sliding or position, one of fixed_target, texts"
    ]
    lines += ["  " + "".join(f"{cell:>16}" for cell in row) for row in rows]
    if room is None:
        return lines
    given = f"{bytes_text(room.memory_bytes)} of {room.place}, a tenth of it left free,"
    if not room.longest_window_tokens:
        return [*lines, f"{given} do not hold the weights."]
    return [
        *lines,
        f"{given} hold the weights and one window of {room.longest_window_tokens:,} tokens, or one text of "
        f"{room.longest_text_tokens:,} tokens that is generated.",
    ]


def _work_lines(works: Sequence[TaskWork], duration: Duration | None, preparing: float | None) -> list[str]:
    rows = [("task", "documents", "requests", "tokens", "new, at most", "in the model")]
    rows += [
        (
            work.task,
            f"{work.documents:,}",
            f"{work.requests:,}",
            f"{work.tokens:,}",
            f"{work.new_tokens:,}",
            "" if duration is None else time_text(duration.model_seconds[work.task]),
        )
        for work in works
    ]
    width = max(len(row[0]) for row in rows) + 2
    lines = [f"{row[0]:<{width}}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows]
    if duration is None:
        return [
            *lines,
            "No time without a throughput: --measured RESULTS.json takes an earlier run's, --measure runs some.",
        ]
    loading = "" if duration.loading_seconds is None else f", loading the model {time_text(duration.loading_seconds)}"
    return [
        *lines,
        f"{time_text(duration.seconds)} in the model, by {duration.source}.",
        f"Before that, imports and requests took {time_text(preparing or 0)} here{loading}.",
    ]


def _value(value: Any) -> str:
    return " ".join(f"{name}: {_value(one)}" for name, one in value.items()) if isinstance(value, dict) else f"{value}"


def bytes_text(count: int) -> str:
    """Returns a size as one reads it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.1f} {unit}" if unit == "GiB" else f"{count:.0f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    raise AssertionError
