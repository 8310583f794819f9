"""`rolling` equals lm-eval's own wikitext task on its own `hf` model, windows, BOS and normalisation included."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from corpus_problems import BOS, EOS, random_text, run_task, tiny_tokenizer
from lm_eval import evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.wikitext import preprocess_wikitext

from sbeval.corpora import resolve_tokens, split_wikitext_pages, store
from sbeval.token_logprobs import TokenLogprobs

LENGTH = 48


class TokenHFLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf`, answering token requests by a forward pass over the window alone."""

    def token_logprobs(self, requests: list[Any]) -> list[TokenLogprobs]:
        answers = []
        for request in requests:
            key, _, lead_in, scored = request.args
            targets = torch.tensor(resolve_tokens(key).tolist())
            logits = self.model(torch.cat([torch.tensor([lead_in]), targets[:-1]])[None]).logits[0]
            logprobs = logits.float().log_softmax(-1)[torch.arange(len(targets)), targets]
            answers.append(TokenLogprobs(logprobs[-scored:].detach().numpy()))
        return answers


@pytest.fixture
def raw_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_open", {})
    pages = [
        f" = Page {number} = \n \n {random_text(30 + 60 * number, number)} a @-@ b , c . = = Part = = \n 's \n"
        for number in range(5)
    ]
    path = tmp_path / "wikitext.txt"
    path.write_text(" \n" + "".join(pages), encoding="utf-8")
    return path


def tiny_llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # sharper than random, so that tokens and context matter
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.eval()


@pytest.mark.parametrize("adds_bos", [False, True])
def test_rolling_equals_lm_evals_wikitext(raw_text: Path, tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = TokenHFLM(tiny_llama(), tokenizer=tokenizer, max_length=LENGTH, device="cpu", batch_size=1)
    pages = list(split_wikitext_pages(raw_text.read_text(encoding="utf-8")))
    theirs = ConfigurableTask(
        config={
            "task": "wikitext",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_dict({"page": pages})},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": preprocess_wikitext.wikitext_detokenizer,
            "process_results": preprocess_wikitext.process_results,
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
            "num_fewshot": 0,
        }
    )
    expected = evaluate(lm=model, task_dict={"tasks": {"wikitext": theirs}, "groups": {}}, bootstrap_iters=0)
    metadata = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "data_path": str(raw_text),
        "context_lengths": [LENGTH],
    }
    found = run_task("sb_wikitext_rolling", model, metadata)
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        value = expected["results"]["wikitext"][f"{metric},none"]
        assert found["values"][f"{metric}@{LENGTH:07d}"] == pytest.approx(value, rel=1e-5)
    for ours, logged in zip(found["samples"], expected["samples"]["wikitext"], strict=True):
        ((_, nats, tokens, words, size),) = ours[f"nll@{LENGTH:07d}"]
        assert -nats == pytest.approx(logged["resps"][0][0], rel=1e-5)
        assert tokens == len(model.tok_encode(logged["arguments"][0][0]))
        assert (words, size) == (len(re.split(r"\s+", logged["doc"]["page"])), len(logged["doc"]["page"].encode()))
