"""`Change`, a change to a loaded model that can be undone, and `Setting`, the facts that decide whether it is made."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Undo = Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The facts of a run that decide which changes are made to the model.

    Attributes:
        causal: whether the model is a causal language model; other models only get the change to flex_attention.
        replaces_parts: whether parts may be replaced by faster ones: on a GPU, for a model that is not sharded.
        kernels: the `kernels` argument of `--model_args`: the implementation of stick-breaking attention.
        skip_threshold: older keys are skipped once the rest of the stick is shorter than this; None never skips.
        default_skip_threshold: the threshold that "auto" stands for where keys can be skipped.
        attention_named: whether the user passed attn_implementation.
        in_memory: whether the user passed a model object; its attention then counts as the user's choice, too.
        rank: the rank of this process among the processes that each hold a copy of the model.
        processes: how many processes hold a copy of the model.
        shares_model: whether the ranks hold one model together (`tp_plan`), so that all must run it at the same time.
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
        name: the change as a plural noun, such as "fused norms"; log lines use it as the subject of a sentence.
        apply: makes the change and returns the function that undoes it, None where the model has nothing to change.
        wanted: whether a run makes the change.
        judged: whether the logits of the whole model decide if the change stays. False for a change that has no effect
            on a short text, such as one for long texts: its `apply` compares the changed parts itself.
    """

    name: str
    apply: Callable[[Any, Setting], Undo | None]
    wanted: Callable[[Setting], bool] = lambda setting: setting.causal
    judged: bool = False
