"""The arguments of `--model_args` that `sb` has beyond those of lm-eval's `hf`; they are not passed on to `hf`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from sbeval.caches.choice import EXPECTED, CacheChoice, parse_cache
from sbeval.checkpoints.facts import KvExpand
from sbeval.rope_parameters import parse_rope_scaling
from sbeval.scoring.requests import NonFinite
from sbeval.settings import Expected, Flag, Patterns, Settings, Tokens, as_number, whole

Kernels = Literal["auto", "triton", "blockwise", "reference"]
Truncation = Literal["left", "error"]
TemplateSuffix = Literal["drop", "keep"]

# Stick-breaking attention skips older keys as soon as the weight left for them is below this number. At 64K tokens this
# changes the NLL of the shipped checkpoint by at most 1.4e-8 nats in fp32, and by at most 1.7e-4 nats in bf16, where
# rounding changes it as much (benchmarks/results/skipping_h200.md).
DEFAULT_SKIP_THRESHOLD = 1e-5
MOST_DRAFT_TOKENS = 15
SOURCE = "--model_args"


def _threshold(value: Any) -> float | Literal["auto"] | None:
    if value is None:
        return None
    return "auto" if value == "auto" else as_number(value, lambda threshold: 0 <= threshold < 1) or None


def _rope_scaling(value: Any) -> dict[str, Any]:
    if not isinstance(value, str | Mapping):
        raise ValueError
    return parse_rope_scaling(value)


def _extrapolation(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError
    from sbeval.models.extrapolation import parse_extrapolation  # here, since it imports torch

    return parse_extrapolation(value)


class AdapterOptions(Settings):
    """The arguments of `sb` beyond those of lm-eval's `hf`."""

    training_length: Tokens | None = Field(
        default=None,
        description="Training length in tokens, if the checkpoint does not record it or records it wrongly.",
    )
    rope_scaling: (
        Annotated[Mapping[str, Any], Expected("a scaling such as dynamic:4, or a JSON object", _rope_scaling)] | None
    ) = Field(
        default=None, description="RoPE scaling at evaluation, in transformers' form; None leaves the checkpoint's own."
    )
    extrapolation: Annotated[Any, Expected("a method such as self_extend:8:512", _extrapolation)] | None = Field(
        default=None,
        description="Method for RoPE models beyond their training length: "
        "self_extend:GROUP:WINDOW, dual_chunk:CHUNK:LOCAL, sink_window:SINK:WINDOW (tokens), log_length or "
        "longrope:FILE.",
    )
    cache: Annotated[CacheChoice, Expected(EXPECTED, parse_cache)] | None = Field(
        default=None,
        description="KV cache that the context is read into, and from which targets are scored and answers generated: "
        "quantized:BITS[:GROUP[:BACKEND]] (transformers' QuantizedCache; 2 and 4 bits by quanto, 8 by hqq), "
        "static, offloaded, or MODULE:FUNCTION, which takes the model and returns a new transformers.Cache. Texts run "
        "one by one. None scores without a cache.",
    )
    cache_chunk: Tokens | None = Field(
        default=None,
        description="Tokens that are read at once behind the context, only with cache=MODULE:FUNCTION; None reads them "
        "one by one, as decoding does.",
    )
    kernels: Kernels = Field(default="auto", description="Implementation of stick-breaking attention.")
    skip_threshold: Annotated[
        float | Literal["auto"] | None,
        Expected(
            "a number from 0 to below 1",
            _threshold,
            "; 0 skips nothing, 1e-5 changes an output by at most 1e-5 of the largest value",
        ),
    ] = Field(
        default="auto",
        description="Older keys are skipped once the rest of the stick is shorter than this; None and 0 visit every "
        f'key. "auto" is {DEFAULT_SKIP_THRESHOLD:g} for models with stick-breaking attention, except with '
        "kernels=reference, which visits every key.",
    )
    max_batch_tokens: Tokens | None = Field(
        default=None, description="Largest number of input tokens in a batch, padding included; None chooses by device."
    )
    kv_expand: KvExpand = Field(
        default="auto", description="How grouped key/value heads of released checkpoints are laid out."
    )
    allow_unread: Patterns | None = Field(
        default=None,
        description="Tensors of the checkpoint or its adapter that the model may leave unread: true for all, or glob "
        "patterns of tensor names, separated by colons, such as v_head.*:mtp.*. Without it, every unread tensor is "
        "an error, unless the model's class declares it.",
    )
    truncation: Truncation = Field(
        default="left",
        description="Whether a prompt that does not fit with the generation budget is cut on the left or an error.",
    )
    template_suffix: TemplateSuffix = Field(
        default="drop",
        description="Whether tokens that the tokenizer adds after every text, such as EOS, are kept after prompts and "
        'contexts. "keep" gives the numbers of `hf`, which reads them between a prompt and its answer.',
    )

    draft_tokens: Annotated[
        int,
        whole(0, f"a whole number from 0 to {MOST_DRAFT_TOKENS}", most=MOST_DRAFT_TOKENS, hint="; 0 looks nothing up"),
    ] = Field(
        default=0,
        description="Prompt-lookup decoding: number of draft tokens that greedy generation copies from earlier text "
        "and verifies in one decode step. Answers in fp32 do not change. Only for models of this family without "
        "sliding windows.",
    )
    context_parallel: Annotated[int, whole(1, "a whole number of processes from 1")] = Field(
        default=1,
        description="Number of ranks that share a window or prompt that fills a batch by itself (max_batch_tokens); "
        "each rank gets a part of its tokens. Only for models of this family, under torchrun or accelerate.",
    )
    non_finite: NonFinite = Field(
        default="error",
        description="What happens if logits are NaN or infinite: error ends the run and names the request, null gives "
        "NaN in every metric that rests on its answer.",
    )
    thinking_tokens: Tokens | None = Field(
        default=None,
        description="Largest number of thinking tokens before each answer, in addition to the answer's own budget; "
        "then the end of thinking is inserted. None generates only the answer.",
    )
    self_test: Flag = Field(
        default=True,
        description="Whether a self-test on a few tens of tokens decides, before the first answer, if the model may "
        "run in batches, with padding, with a KV cache and with its attention implementation. It also scores some rows "
        "of the run's own batches again, one at a time. Not for models of this family.",
    )

    @property
    def default_skip_threshold(self) -> float:
        """The number that `skip_threshold=auto` means if the kernels can skip keys."""
        return DEFAULT_SKIP_THRESHOLD

    @classmethod
    def pop(cls, arguments: dict[str, Any]) -> Self:
        """Removes the fields of this class from `arguments`, checks their values and returns them.

        Raises:
            UserError: an argument has a value that is not allowed.
        """
        passed = {name: arguments.pop(name) for name in cls.model_fields if name in arguments}
        # `hf` takes a bool or None here
        if passed.get("truncation", "") is None or isinstance(passed.get("truncation"), bool):
            passed["truncation"] = "left"
        return cls.read(passed, place="", source=SOURCE)
