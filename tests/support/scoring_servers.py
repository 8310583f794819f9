"""Test doubles of lm-eval backends over a tiny model: a completions server, and vLLM's classes."""

import contextlib
import importlib.machinery
import importlib.metadata
import json
import sys
import threading
from collections.abc import Callable, Container, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lm_eval.api.registry import model_registry
from transformers import AutoModelForCausalLM, AutoTokenizer

Choice = dict[str, Any]


class CompletionsServer(ThreadingHTTPServer):
    """Speaks `/v1/completions` with `echo` and `logprobs`; `change` may spoil a prompt, `spoil` an answer, `spoil_body`
    all that is sent.

    Prompts are kept in `asked`; requests whose numbers are in `fails_at` are answered with an error.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Completions)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked: list[list[int]] = []
        self.fails_at: Container[int] = ()
        self.change: Callable[[list[int]], list[int]] = list
        self.spoil: Callable[[Choice], object] = lambda choice: None
        self.spoil_body: Callable[[dict[str, Any]], Any] = dict
        self.tells_usage = True
        self.lock = threading.Lock()

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "model": "tiny",
            "base_url": f"http://127.0.0.1:{self.server_port}/v1/completions",
            "tokenizer": self.tokenizer.name_or_path,
            "tokenizer_backend": "huggingface",
            "max_length": 130,
            "max_retries": 1,
        }

    @torch.no_grad()
    def choice(self, index: int, prompt: list[int]) -> Choice:
        tokens = torch.tensor([prompt])
        logprobs = self.model(tokens).logits[0].log_softmax(-1)
        told = [None, *logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()]
        best, most_probable = logprobs.max(-1)
        names = self.tokenizer.convert_ids_to_tokens(most_probable.tolist())
        texts = [*self.tokenizer.convert_ids_to_tokens(prompt), names[-1]]
        top = [{own: nats} for own, nats in zip(texts[1:], [*told[1:], float(best[-1])], strict=True)]
        for alternatives, name, nats in zip(top, names, best.tolist(), strict=True):
            alternatives[name] = nats
        choice = {"token_logprobs": [*told, float(best[-1])], "top_logprobs": [None, *top], "tokens": texts}
        self.spoil(choice)
        return {"index": index, "text": "", "logprobs": choice}


class _Completions(BaseHTTPRequestHandler):
    server: CompletionsServer

    def do_POST(self) -> None:
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["echo"], asked["logprobs"], asked["max_tokens"]) == (True, 1, 1)
        prompts = asked["prompt"] if isinstance(asked["prompt"][0], list | str) else [asked["prompt"]]
        if text := isinstance(prompts[0], str):
            prompts = server.tokenizer([prompts] if isinstance(prompts, str) else prompts)["input_ids"]
        with server.lock:
            server.asked += [] if text else prompts
            fails = len(server.asked) in server.fails_at
        prompts = [server.change(prompt) for prompt in prompts]
        answer: Any = {"choices": [server.choice(*pair) for pair in enumerate(prompts)]}
        if server.tells_usage:
            answer["usage"] = {"prompt_tokens": sum(map(len, prompts))}
        body = b"out of memory" if fails else json.dumps(server.spoil_body(answer)).encode()
        self.send_response(500 if fails else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def completions_server(folder: Path) -> Iterator[CompletionsServer]:
    with CompletionsServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class SamplingParams(NamedTuple):
    temperature: float = 1.0
    prompt_logprobs: int | None = None
    max_tokens: int | None = 16
    detokenize: bool = True


class TokensPrompt(dict[str, Any]): ...


class LLM:
    """The methods of vLLM's class that lm-eval calls, with the signatures of 0.9 to 0.11, over a tiny model."""

    spoil: Callable[[SimpleNamespace], object] = staticmethod(lambda output: None)

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = None,
        max_model_len: int | None,
        max_num_seqs: int | None,
        enable_lora: bool,
        max_lora_rank: int,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))

    @torch.no_grad()
    def generate(
        self,
        prompts: list[TokensPrompt],
        /,
        sampling_params: list[SamplingParams],
        *,
        use_tqdm: bool = True,
        lora_request: object = None,
    ) -> list[SimpleNamespace]:
        assert {*sampling_params} == {SamplingParams(0, prompt_logprobs=1, max_tokens=1, detokenize=False)}
        return [self._output(prompt["prompt_token_ids"]) for prompt in prompts]

    def _output(self, ids: list[int]) -> SimpleNamespace:
        assert len(ids) < self.llm_engine.model_config.max_model_len
        told: list[dict[int, Any] | None] = [None]
        for token, row in zip(ids[1:], self.model(torch.tensor([ids])).logits[0].log_softmax(-1), strict=False):
            told.append({i: SimpleNamespace(logprob=float(row[i])) for i in (int(row.argmax()), token)})
        output = SimpleNamespace(prompt_token_ids=[*ids], prompt_logprobs=told)
        type(self).spoil(output)
        return output


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """Replaces vLLM by this class where lm-eval imports it."""
    version, members = importlib.metadata.version, {"LLM": type("LLM", (LLM,), {}), "SamplingParams": SamplingParams}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.0" if name == "vllm" else version(name))
    for name, held in {
        "vllm": members | {"TokensPrompt": TokensPrompt},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": object},
        "vllm.renderers": {},
        "vllm.renderers.hf": {"resolve_chat_template": lambda **_: None},
        "vllm.tokenizers": {
            "get_tokenizer": lambda name, tokenizer_mode, **kw: AutoTokenizer.from_pretrained(name, **kw)
        },
    }.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "lm_eval.models.vllm_causallms", raising=False)
    monkeypatch.setitem(model_registry._objs, "vllm", "lm_eval.models.vllm_causallms:VLLM")
    return members["LLM"]  # type: ignore[return-value]
