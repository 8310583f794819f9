"""A change to a loaded model: what it is called, when it is made, how it is made and how it is undone."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Undo = Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The facts of a run that decide which changes are made.

    Attributes:
        causal: whether the model is a causal language model; other models keep everything but flex_attention.
        replaces_parts: whether parts may be replaced by faster ones: on a GPU, for a model that is not sharded.
        kernels: the kernels of stick-breaking attention, as `--model_args` names them.
        skip_threshold: the stick below which older keys are skipped, None for never.
        default_skip_threshold: the threshold that "auto" stands for where keys can be skipped.
        attention_named: whether the user passed attn_implementation.
        in_memory: whether the user passed a model in memory, whose attention is the user's choice, too.
        rank: the number of this process among those that each hold a model.
        processes: how many processes hold a model each.
        shares_model: whether several processes share one model by a tensor plan, so that all must run it together.
    """

    causal: bool = True
    replaces_parts: bool = False
    kernels: str = "auto"
    skip_threshold: float | Literal["auto"] | None = "auto"
    default_skip_threshold: float | None = None
    attention_named: bool = False
    in_memory: bool = False
    rank: int = 0
    processes: int = 1
    shares_model: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change that makes a loaded model faster, smaller or able to run, and must not move its logits.

    Attributes:
        name: the change in the plural, such as "fused norms": the subject of a sentence in the log.
        apply: makes the change and returns the function that undoes it, None where the model has nothing to change.
        wanted: whether a run makes the change.
        judged: whether the logits of the whole model decide. A change that a short text does not show, such as one for
            long texts, is not judged: it compares its own parts.
    """

    name: str
    apply: Callable[[Any, Setting], Undo | None]
    wanted: Callable[[Setting], bool] = lambda setting: setting.causal
    judged: bool = False
