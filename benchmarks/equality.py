"""`--model sb` against `--model hf` on a random Llama: rolling log-likelihoods of wikitext pages, in fp32.

    python benchmarks/equality.py WIKITEXT.txt [--max-length 512]

WIKITEXT.txt is a raw split of wikitext, whose pages begin with level-1 headings. Prints the worst relative difference.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sbeval.corpora import split_wikitext_pages
from sbeval.model_adapters.lm import StickBreakingLM


def checkpoint(folder: Path, texts: list[str]) -> None:
    """Writes a small Llama with random weights and a tokenizer trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=4096, special_tokens=special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[0])
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("--max-length", type=int, default=512)
    arguments = parser.parse_args()
    pages = list(split_wikitext_pages(arguments.wikitext.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), pages)
        options = {"pretrained": folder, "dtype": "float32", "max_length": arguments.max_length, "device": "cpu"}
        requests = [Instance("loglikelihood_rolling", {}, (page,), index) for index, page in enumerate(pages)]
        theirs = HFLM(**options).loglikelihood_rolling(requests, disable_tqdm=True)
        ours = StickBreakingLM(**options).loglikelihood_rolling(requests, disable_tqdm=True)
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(f"{len(pages)} pages, max_length {arguments.max_length}: worst relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
