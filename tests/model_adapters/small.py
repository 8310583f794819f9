"""Small models of well-known architectures, a tokenizer, a text and requests."""

import codecs
import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from corpus_problems import byte_level_bpe
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from packaging.version import Version

from sbeval.caches.build import OLDEST_TRANSFORMERS_OF_QUANTIZED
from sbeval.corpora import TokenizedCorpus, token_key
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.models import SbevalConfig
from sbeval.scoring.requests import TokenLogprobsRequest

NEEDS_QUANTIZED_CACHES = pytest.mark.skipif(
    Version(transformers.__version__).release < OLDEST_TRANSFORMERS_OF_QUANTIZED,
    reason="cache=quantized is refused with this transformers",
)

TEXT = "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex.\n"
Checkpoints = Callable[..., Path]  # the folder of an architecture, by name
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
}


def _small(config: Any, **fields: Any) -> Callable[[int], Any]:
    return lambda vocabulary: config(vocab_size=vocabulary, **{**SIZES, **fields})


ARCHITECTURES: dict[str, Callable[[int], Any]] = {
    "llama": _small(transformers.LlamaConfig),
    "qwen3": _small(transformers.Qwen3Config, tie_word_embeddings=True),
    "gemma2": _small(
        transformers.Gemma2Config, final_logit_softcapping=0.5, sliding_window=16, query_pre_attn_scalar=8
    ),
    "gemma3": _small(transformers.Gemma3TextConfig, sliding_window=16, query_pre_attn_scalar=8, num_hidden_layers=6),
    "granite": _small(
        transformers.GraniteConfig, logits_scaling=0.25, embedding_multiplier=3.0, attention_multiplier=0.5
    ),
    "cohere": _small(transformers.CohereConfig, logit_scale=0.3),
    "mistral": _small(transformers.MistralConfig, sliding_window=16),
    "gpt_neox": lambda v: transformers.GPTNeoXConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        vocab_size=v,
        **{name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
    ),
    "stickbreaking": _small(SbevalConfig, attention="stickbreaking", remainder="value", logits_divisor=0.5),
    "rope": _small(SbevalConfig, attention="rope", training_length_tokens=32),
    "mixture beside rope": _small(
        SbevalConfig,
        **{"num_experts": 4, "num_experts_per_token": 2},
        layer_overrides=[{}, {"attention": "rope", "num_experts": None, "num_experts_per_token": None}],
    ),
    "forgetting": _small(SbevalConfig, attention="forgetting", key_shift=True, value_shift=True),
    "alibi": _small(SbevalConfig, attention="alibi"),
    "nape asentmax": _small(SbevalConfig, attention="nape", attention_weights="asentmax"),
    "gated exclusive": _small(SbevalConfig, attention="rope", attention_gate=True, exclusive_self_attention=True),
    "gpt2": lambda v: transformers.GPT2Config(vocab_size=v, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def tiny_tokenizer(*, adds_bos: bool) -> transformers.PreTrainedTokenizerFast:
    return byte_level_bpe([TEXT], 320, adds_bos=adds_bos, pad_token="<pad>")


def odd(architecture: str, *, attn_implementation: str | None = None, **sizes: int) -> transformers.PreTrainedModel:
    """A model whose MLP is 51 channels wide, and other sizes as asked for."""
    torch.manual_seed(0)
    config = ARCHITECTURES[architecture](64)
    config.update({"n_inner" if architecture == "gpt2" else "intermediate_size": 51} | sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attn_implementation
    )
    return model.eval()


def english() -> str:
    """The Zen of Python, which every interpreter carries."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def instances(kind: str, arguments: Sequence[tuple[Any, ...]], task: str = "task") -> list[Instance]:
    return [Instance(kind, doc={}, arguments=asked, idx=i, metadata=(task, i, 1)) for i, asked in enumerate(arguments)]


LINES = [line for line in english().splitlines() if line]


def load_lm(folder: Path | str, **options: Any) -> StickBreakingLM:
    return StickBreakingLM(str(folder), **{"device": "cpu", "dtype": "float32", **options})


def both(pretrained: Path | Any, **options: Any) -> tuple[HFLM, StickBreakingLM]:
    """A checkpoint, or a model in memory, as lm-eval's `hf` and as `sb`."""
    pretrained = str(pretrained) if isinstance(pretrained, Path) else pretrained
    options = {"device": "cpu", "dtype": "float32", **options}
    return HFLM(pretrained, **options), StickBreakingLM(pretrained, **options)


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """Returns the KV cache among the keyword arguments of a forward pass; transformers 5.24 renamed the argument."""
    return arguments.get("past_key_values", arguments.get("cache"))


def generated(lm: Any, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Answers to prompts, each with its setting."""
    return lm.generate_until(instances("generate_until", asked), disable_tqdm=True)


def save_lora(folder: Path, base: Path, *modules: str, seed: int = 0) -> str:
    """Saves an adapter of random weights for a checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(folder)
    return str(folder)


def windows(corpus: TokenizedCorpus, places: Sequence[tuple[int, int, int]]) -> list[TokenLogprobsRequest]:
    """Windows of a corpus by their start, context length and number of scored tokens."""
    return [
        TokenLogprobsRequest(token_key(corpus, start, start + length), length, 0, scored)
        for start, length, scored in places
    ]


@contextlib.contextmanager
def tokens_read(lm: Any) -> Iterator[list[int]]:
    """Yields how many tokens each forward pass reads, as it runs."""
    read: list[int] = []
    hook = lm.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].numel()))
    yield read
    hook.remove()


def likelihoods(lm: Any, pairs: Sequence[tuple[str, str]]) -> list[float]:
    return [score for score, _ in lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)]


def copied(folder: Path, place: Path, file: str = "config.json", **changes: Any) -> Path:
    """A copy of a checkpoint in whose configuration, or another file, these keys are changed."""
    copy = shutil.copytree(folder, place / "copy")
    (copy / file).write_text(json.dumps({**json.loads((copy / file).read_text()), **changes}))
    return copy


def t5(folder: Path) -> Path:
    tokenizer = tiny_tokenizer(adds_bos=False)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    config.pad_token_id, config.eos_token_id = 2, 1
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
