"""Small tokenizers, corpora and a language model with a known answer, for the tests of corpora and perplexity."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lm_eval import evaluate
from lm_eval.api.model import LM
from numpy.typing import NDArray
from partial_model import PartialModel
from ruler_problems import byte_level_bpe, task_manager

from sbeval.corpora import Corpus, make_document, resolve_tokens
from sbeval.scoring.requests import TokenLogprobs

BOS, EOS = 0, 1
SIZES: dict[str, Any] = {
    **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
}
WIKITEXT_FILE = Path(__file__).parent / "texts" / "wikitext.txt"
WIKITEXT = WIKITEXT_FILE.read_text(encoding="utf-8")
"""Pages of several paragraphs written for these tests, in wikitext's raw form; `CRAWL` are some as a crawl has them."""
CRAWL = [json.loads(line)["text"] for line in WIKITEXT_FILE.with_name("crawl.jsonl").read_text("utf-8").splitlines()]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "old", "towers", "keep", "bells"]


@functools.cache
def tiny_tokenizer(*, adds_bos: bool = False, vocabulary: int = 400) -> transformers.PreTrainedTokenizerFast:
    return byte_level_bpe([" ".join(WORDS)] * 4, vocabulary, adds_bos=adds_bos)


def random_text(words: int, seed: int) -> str:
    """Words, commas, line breaks and characters of one to four bytes."""
    random = np.random.default_rng(seed)
    ends = [" ", " ", " ", ", ", "\n", " é ", " 😀 "]
    return "".join(WORDS[random.integers(len(WORDS))] + ends[random.integers(len(ends))] for _ in range(words))


def corpus_of(texts: list[str], name: str = "small") -> Corpus:
    return Corpus(name=name, documents=lambda: (make_document(f"d{i}", text) for i, text in enumerate(texts)))


def write_folder(folder: Path, sizes: list[int]) -> Path:
    """Writes one file per document, with about this many words each."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, size in enumerate(sizes):
        (folder / f"{index:03d}.txt").write_text(random_text(size, index), encoding="utf-8")
    return folder


class KnownLM(PartialModel):
    """A model whose log-probability of a token is a formula in it, the token before, and the tokens read so far."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    @staticmethod
    def nll(before: NDArray[Any], target: NDArray[Any], read: NDArray[Any]) -> NDArray[np.float64]:
        """NLL in nats; `read` counts the model's inputs up to the prediction."""
        return np.asarray(1 + ((before * 31 + target * 17) % 101) / 50 + 1 / np.sqrt(read), np.float64)

    def token_logprobs(self, requests: list[Any]) -> list[TokenLogprobs]:
        answers = []
        for request in requests:
            key, length, lead_in, scored = request.args
            self.seen.append(request.args)
            targets = resolve_tokens(key)
            assert len(targets) == length
            inputs = np.concatenate([[lead_in], targets[:-1]])
            nll = self.nll(inputs, targets, np.arange(1, length + 1))
            answers.append(TokenLogprobs((-nll[length - scored :]).astype(np.float32)))
        return answers


def tiny_llama(*, sharpness: float = 6.0) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(bos_token_id=BOS, eos_token_id=EOS, **SIZES)
    return sharpened(transformers.LlamaForCausalLM(config), sharpness)


def sharpened(model: Any, factor: float) -> Any:
    """Makes the weights of a random model so large that tokens and context matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model.eval()


def tiny_gpt2(folder: Path, *, positions: int) -> Path:
    """Saves a model with learned positions."""
    config = transformers.GPT2Config(vocab_size=400, n_positions=positions, n_embd=16, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def run_task(name: str, model: LM, metadata: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs one task through lm-eval and returns its results, samples and record."""
    loaded = task_manager(metadata).load([name])
    results = evaluate(lm=model, task_dict=loaded, log_samples=True, bootstrap_iters=0, **options)
    values = {key.removesuffix(",none"): value for key, value in results["results"][name].items()}
    record = results["configs"][name]["metadata"]["sbeval"]
    return {"values": values, "samples": results["samples"][name], "record": record, "whole": results}
