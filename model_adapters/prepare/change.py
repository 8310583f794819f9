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
        replaces_modules: whether submodules may be replaced by faster ones: on a GPU, if the model is not sharded.
        kernels: the `kernels` argument of `--model_args`: the implementation of stick-breaking attention.
        skip_threshold: stick-breaking attention skips older keys as soon as the weight left for them is below this
            number; None never skips.
        default_skip_threshold: the number that skip_threshold="auto" means, if the kernels can skip keys.
        attention_named: whether the user passed attn_implementation.
        in_memory: whether the user passed a model object; its attention then counts as the user's choice, too.
        rank: the data-parallel rank: the rank of this process among those that each hold a copy of the model.
        processes: how many processes each hold a copy of the model.
        shares_model: whether the model is tensor parallel (`tp_plan`), so that all ranks must run it at the same time.
    """

    causal: bool = True
    replaces_modules: bool = False
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
        apply: makes the change and returns the function that undoes it, None if the model has nothing to change.
        applies_to: returns whether a run with this `Setting` makes the change.
        judged: whether the logits of the whole model on a short text decide if the change stays. False for a change
            that affects only long texts: its `apply` compares the changed submodules itself.
    """

    name: str
    apply: Callable[[Any, Setting], Undo | None]
    applies_to: Callable[[Setting], bool] = lambda setting: setting.causal
    judged: bool = False
