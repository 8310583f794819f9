"""`Opened`: the result of opening a model. It holds the model, its tokenizer and facts that later steps need."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sbeval.checkpoints.unread import UnreadTensors
from sbeval.model_adapters.open.tokenizer import prefix_token_id
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.prepare.change import Setting


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A loaded model and its tokenizer.

    Attributes:
        model: the model in evaluation mode, on its devices.
        tokenizer: its tokenizer, with a padding token that the model knows.
        source: the folder or hub id that the model was loaded from, None for a model in memory.
        format: the checkpoint's format, such as "sbeval" or "huggingface:llama".
        attention: the kind of attention in a format that transformers does not know, None for other formats.
        folder: the folder of the checkpoint's files, None for a model in memory.
        unread: tensors of the checkpoint and of its adapter that the model does not read.
        options: the adapter's own arguments.
        arguments: the arguments of `hf` as the user passed them.
        causal: whether it is a causal language model; encoder-decoder models run as they do in `hf`.
        device: the device of the model's inputs.
        mixed_precision_dtype: the dtype of autocast, None without autocast.
        max_length: most tokens of an lm-eval request, including those to generate.
        max_gen_toks: most tokens of an answer if a task names no number.
        batch_size: the number of rows in a batch, or "auto".
        max_batch_size: most rows in a batch if `batch_size` is "auto".
        add_bos_token: whether tokenizing adds special tokens, None for the tokenizer's default.
        passed_prefix_token_id: the token id to put before the first token of a text, None for BOS or EOS.
        think_end_token: the text or token id that ends the model's thinking, None if the model does not think.
        rank: the data-parallel rank: the rank of this process among those that each hold a copy of the model.
        world_size: how many processes each hold a copy of the model.
    """

    model: Any
    tokenizer: Any
    source: str | None
    format: str
    attention: str | None = None
    folder: Path | None = None
    unread: UnreadTensors = dataclasses.field(default_factory=UnreadTensors)
    options: AdapterOptions
    arguments: Mapping[str, Any]
    causal: bool
    device: torch.device
    mixed_precision_dtype: torch.dtype | None
    max_length: int
    max_gen_toks: int
    batch_size: int | str
    max_batch_size: int
    add_bos_token: bool | None
    passed_prefix_token_id: int | None
    think_end_token: str | int | None
    rank: int
    world_size: int

    @property
    def shares_model(self) -> bool:
        """Whether several ranks hold one model together by tensor parallelism (`tp_plan`)."""
        return self.arguments.get("tp_plan") is not None

    @property
    def embeddings(self) -> int:
        """The number of rows of the embedding matrix: every token id must be below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def end_token_ids(self) -> list[int]:
        """The token ids at which the model's generation config ends an answer."""
        ends = self.model.generation_config.eos_token_id
        return [ends] if isinstance(ends, int) else list(ends or ())

    @property
    def prefix_token_id(self) -> int:
        """The token id that is put before the first token of a text.

        Raises:
            UserError: the user passed no token id, and the tokenizer has neither BOS nor EOS.
        """
        return prefix_token_id(self.tokenizer, self.passed_prefix_token_id)

    def setting(self) -> Setting:
        """Returns the `Setting`: the facts by which `prepare` decides which changes to make."""
        sharded = not self.shares_model and any(hasattr(each, "full_tensor") for each in self.model.parameters())
        started = torch.distributed.is_available() and torch.distributed.is_initialized()
        return Setting(
            causal=self.causal,
            replaces_modules=self.device.type == "cuda" and not sharded,
            kernels=self.options.kernels,
            skip_threshold=self.options.skip_threshold,
            default_skip_threshold=self.options.default_skip_threshold,
            attention_named="attn_implementation" in self.arguments,
            in_memory=self.source is None,
            rank=self.rank,
            processes=self.world_size if started else 1,
            shares_model=self.shares_model and started,
        )
