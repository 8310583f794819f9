"""Checkpoint folders of every format, damaged and evaluated.

The number is the log-likelihood of a text, with the answer to a prompt. It is named as changed where the run's record
or the loaded parts tell it from the undamaged checkpoint's: the model's record (its hash of the weights included), the
loaded model's configuration, the generation configuration, the tokenizer's hash, or a logged warning. A value of
another kind than the one it replaces (text for a number, `true` for a count) in `config.json` or
`generation_config.json` may be refused or make no difference; read as something else it would be a number changed in
silence, whatever is recorded.
"""

import contextlib
import functools
import io
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import peft
import torch
import transformers
from corpus_problems import sharpened
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sbeval.checkpoints.facts import longest_input_tokens
from sbeval.corpora.tokenizers import tokenizer_sha256
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.models import SbevalConfig
from tests.checkpoints import layouts, test_forgetting, test_lm_engine, test_moduleformer
from tests.fuzz.mutations import Change, changed_bytes, damage, put_in_place_of, same_kind
from tests.fuzz.outcomes import Silent, said
from tests.model_adapters.small import instances

TEXT = "simple is better than complex. now is better than never."
LETTERS = " .abcdefghijklmnopqrstuvwxyz"
# small enough that every layout has rows for it
SPECIAL = ("<s>", "</s>", "<pad>")
SIZES: dict[str, Any] = {
    **{"vocab_size": layouts.VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_UNSTEADY = ("command", "tokens_per_second", "name")
_IN_CONFIG = ("_name_or_path", "name_or_path")


class Evaluated(NamedTuple):
    """What an evaluation gives, and what names it."""

    nats: float
    answer: str
    named_by: str


def _foreign(made: Callable[..., layouts.Made], **fields: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        config, tensors = made(**fields)
        layouts.save(folder, {**config, **_IDS}, tensors)

    return save


def _of_transformers(config: Callable[[], Any], **options: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        made = config()
        for name, value in _IDS.items():
            setattr(made, name, value)
        torch.manual_seed(0)
        sharpened(transformers.AutoModelForCausalLM.from_config(made), 8.0).save_pretrained(folder, **options)

    return save


def _pickled(folder: Path) -> None:
    _of_transformers(lambda: transformers.LlamaConfig(**SIZES))(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=layouts.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128)


def _moduleformer() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config, tensors = test_moduleformer.checkpoint("mlp")
    return {**config, "block_size": 96, "history_length": 32}, tensors


_HEADS = {"head_bias": True, "head_norm": True}
LAYOUTS: dict[str, Callable[[Path], None]] = {
    "dolomite A": _foreign(layouts.dolomite, kv_heads=2, n_positions=128),
    "dolomite C": _foreign(layouts.dolomite, model_type="gpt_dolomite", **_HEADS),
    "dolomite C''": _foreign(layouts.dolomite, model_type="gpt_base", **_HEADS, attention_multiplier=0.4),
    "dolomite softmax": _foreign(
        layouts.dolomite, model_type="gpt_dolomite", mixer="softmax", flat=True, rope_theta=5000.0
    ),
    "dolomite mixture": _foreign(lambda: layouts.with_experts(*layouts.dolomite(kv_heads=2, **_HEADS), shared=16)),
    "lm-engine": _foreign(
        test_lm_engine.lm_engine, mixer={"attention_gate": True, "sliding_window": 20}, mlp=test_lm_engine.MOE
    ),
    "fla": _foreign(layouts.fla, qkv_bias=True, qk_norm=True, attend_current=False, kv_heads=2, tied=False),
    "fla forgetting": _foreign(test_forgetting.fla_forgetting, kv_heads=2, qkv_bias=True),
    "fox": _foreign(test_forgetting.fox, use_rope=True, **test_forgetting.PRO),
    "fox softmax": _foreign(test_forgetting.fox, model_type="transformer-project_fox", window_size=20),
    "moduleformer": _foreign(_moduleformer),
    "stickbreaking": _of_transformers(
        lambda: SbevalConfig(attention="stickbreaking", remainder="value", logits_divisor=0.5, **SIZES)
    ),
    "rope": _of_transformers(lambda: SbevalConfig(attention="rope", training_length_tokens=32, **SIZES)),
    "alibi in shards": _of_transformers(lambda: SbevalConfig(attention="alibi", **SIZES), max_shard_size="8KB"),
    "llama": _of_transformers(lambda: transformers.LlamaConfig(**SIZES)),
    "llama in shards": _of_transformers(lambda: transformers.LlamaConfig(**SIZES), max_shard_size="8KB"),
    "llama pickled": _pickled,
    "gpt2": _of_transformers(_gpt2),
}
ADAPTER = "llama with an adapter"
_METHODS = (
    *("awq", "bitsandbytes", "compressed-tensors", "exl2", "fp8", "gptq", "hqq", "modelopt", "quark", "torchao"),
    7,
)
KEYS: dict[str, list[Any]] = {
    "quantization_config": [{}, {"bits": 4}, "gptq", *({"quant_method": method} for method in _METHODS)],
    "model_type": ["gemma3", "mamba", "mixtral", "nope"],
    "attn_implementation": ["flex_attention", "eager", "nope", 7],
    "return_dict": [False, None, "x"],
    "num_labels": [10**9, -1, "x"],
    **{key: [10**9] for key in ("num_experts", "num_experts_per_tok", "n_group", "topk_group")},
}
"""What a configuration of another checkpoint may say, written into one that does not."""
NAMES = [*LAYOUTS, ADAPTER]


def small_tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose ids are below `vocabulary`: letters, and pairs of them."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    merges = []
    for pair in ("th", "er", "is", "be", "ne", "ha", "le", "te", "an", "ow"):
        vocab[pair] = len(vocab)
        merges.append((pair[0], pair[1]))
    assert len(vocab) <= vocabulary
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    )


@functools.cache
def undamaged(layout: str) -> tuple[Path, Evaluated]:
    """Makes the small checkpoint of a layout once, and evaluates it."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "checkpoint"
    LAYOUTS[layout](folder)
    small_tokenizer(41).save_pretrained(folder)
    generation = {"repetition_penalty": 1.3, "max_length": 64, "transformers_version": "5.0.0", **_IDS}
    generation |= {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_beams": 1}
    generation |= {"suppress_tokens": [30], "bad_words_ids": [[31]], "no_repeat_ngram_size": 4, "use_cache": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with said():
        return folder, evaluate(folder)


@functools.cache
def undamaged_adapter() -> tuple[Path, Evaluated]:
    """Makes a PEFT adapter for the small llama once, and evaluates it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base := undamaged("llama")[0])
    torch.manual_seed(1)
    options = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    folder = base.with_name("adapter")
    peft.get_peft_model(model, options).save_pretrained(folder)
    with said():
        return folder, evaluate(base, peft=str(folder))


def evaluate(folder: Path, **arguments: Any) -> Evaluated:
    """Loads a checkpoint as a run does, scores a text and answers a prompt."""
    longest_input_tokens(str(folder))  # tasks ask before the model is loaded
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        lm = StickBreakingLM(str(folder), device="cpu", dtype="float32", batch_size=1, **arguments)
        (nats,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(TEXT,)]), disable_tqdm=True)
        prompt = ("now is ", {"until": ["."], "max_gen_toks": 6, "do_sample": False})
        (answer,) = lm.generate_until(instances("generate_until", [prompt]), disable_tqdm=True)
        record = {key: value for key, value in lm.get_model_info()["sbeval"].items() if key not in _UNSTEADY}
    config = {key: value for key, value in lm.model.config.to_dict().items() if key not in _IN_CONFIG}
    generation = lm.model.generation_config.to_dict()
    named_by = json.dumps([record, config, generation, tokenizer_sha256(lm.tokenizer)], default=str, sort_keys=True)
    return Evaluated(nats, answer, named_by)


def compare(before: Evaluated, after: Evaluated, changes: list[Change], warnings: list[str]) -> str:
    """Returns what a damaged checkpoint's numbers are: equal, or named as changed."""
    if abs(before.nats - after.nats) <= 1e-6 * abs(before.nats) and before.answer == after.answer:
        return "equal"
    if len(changes) == 1 and not same_kind(changes[0].old, changes[0].new) and "token_id" not in str(changes[0].path):
        raise Silent(f"{changes[0]}: {before[:2]} became {after[:2]}")
    if before.named_by != after.named_by or warnings:
        return "named"
    raise Silent(f"{changes}: {before[:2]} became {after[:2]}")


def _damage_weights(folder: Path, rng: Random) -> None:
    file = rng.choice(sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]))
    raw = file.read_bytes()
    kind = rng.choice(["header", "bytes", "other", "shape", "missing"])
    if kind == "other" or (file.suffix == ".bin" and kind != "bytes"):
        put_in_place_of(file, rng)
    elif kind == "bytes":
        file.write_bytes(changed_bytes(raw, rng))
    elif kind == "header":
        size = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + size]
        (folder / "header").write_bytes(header)
        damage(folder / "header", rng, tree_share=0.7)
        header = (folder / "header").read_bytes() if (folder / "header").is_file() else b""
        size = rng.choice([len(header)] * 6 + [2**63, 2**64 - 1, 0, len(header) + 1, 10**9])
        file.write_bytes(size.to_bytes(8, "little") + header[: 2**20] + raw[8 + int.from_bytes(raw[:8], "little") :])
    else:
        tensors = load_file(file)
        name = rng.choice(sorted(tensors))
        tensor = tensors.pop(name)
        if kind == "shape":
            new = [tensor[..., :-1], tensor[None], tensor.flatten(), tensor.to(torch.int32), tensor * float("nan")]
            tensors[name] = rng.choice(new).contiguous()
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})


def _fuzz_adapter(rng: Random, folder: Path) -> str:
    source, before = undamaged_adapter()
    copy = shutil.copytree(source, folder / "adapter")
    if rng.random() < 0.3:
        _damage_weights(copy, rng)
    else:
        damage(copy / "adapter_config.json", rng)
    with said() as warnings:
        after = evaluate(undamaged("llama")[0], peft=str(copy))
    return compare(before, after, [], warnings)


def fuzz(layout: str, rng: Random, folder: Path) -> str:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if layout == ADAPTER:
        return _fuzz_adapter(rng, folder)
    source, before = undamaged(layout)
    copy = shutil.copytree(source, folder / "checkpoint")
    names = ["config.json"] * 10 + ["generation_config.json"] * 3 + ["tokenizer_config.json"] * 3
    names += ["tokenizer.json"] * 3 + ["weights"] * 4 + ["model.safetensors.index.json"] * 8 + ["added"] + ["keys"] * 3
    name = rng.choice([name for name in names if name in ("weights", "added", "keys") or (copy / name).is_file()])
    changes: list[Change] = []
    if name == "weights":
        _damage_weights(copy, rng)
    elif name == "keys":
        key = rng.choice(sorted(KEYS))
        content = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**content, key: rng.choice(KEYS[key])}))
    elif name == "added":
        other = copy / rng.choice(
            ["special_tokens_map.json", "added_tokens.json", "training_record.json", "vocab.json"]
        )
        other.write_text(json.dumps({"recipe": {"name": "r", "seed": 1}, "bos_token": "<s>", "<new>": 60}))
        damage(other, rng)
    else:
        found = damage(copy / name, rng)
        changes = found or [] if name in ("config.json", "generation_config.json") else []
    with said() as warnings:
        after = evaluate(copy)
    return compare(before, after, changes, warnings)
