"""The comparison of engines: the compared numbers, and the token counts of a server's requests."""

import json
import math
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from research.real_models.engines import differences, numbers, print_table
from research.real_models.long_prompts import family, peak_gib
from research.real_models.served import counted

pytestmark = pytest.mark.exhaustive


def test_a_difference_in_nats_is_the_largest_and_all_else_is_equal_or_named() -> None:
    reference = {"nll@0000064": 2.0, "nll@0000128": 1.5, "tokens@0000064": 64.0, "exact_match@0000064": 1.0}
    assert differences(reference, reference) == (0.0, [])
    other = {"nll@0000064": 2.25, "nll@0000128": 1.0, "tokens@0000064": 63.0}
    assert differences(reference, other) == (0.5, ["exact_match@0000064", "tokens@0000064"])
    assert differences({"exact_match@0000064": 1.0}, {"exact_match@0000064": 1.0}) == (None, [])


def test_numbers_are_metrics_without_standard_errors_and_logarithms_of_perplexities() -> None:
    metrics = {"nll@0000064,none": 2.0, "nll_stderr@0000064,none": 0.1, "alias": "x", "perplexity,none": math.e}
    metrics["word_perplexity,none"] = 2.0
    assert numbers({"task": metrics}) == {"task": {"nll@0000064": 2.0, "nll": pytest.approx(1.0)}}


def test_the_table_names_a_backend_without_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_table({"hf": {"task": {"nll": 2.0}}, "sb": {"task": {"nll": 2.5}}, "vllm": {}}) == 0.5
    assert "| `task` | 1 | 5.0e-01 |  | vllm: nll |" in capsys.readouterr().out


class _Completions(BaseHTTPRequestHandler):
    """A server that counts one token too many for prompts that begin with 9, and refuses prompts that begin with 8."""

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        prompts = prompt if isinstance(prompt[0], list | str) else [prompt]
        read = sum(map(len, prompts)) + (prompts[0][0] == 9)
        body = json.dumps({"usage": {"prompt_tokens": read, "completion_tokens": len(prompts)}}).encode()
        self.send_response(400 if prompts[0][0] == 8 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def completions() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Completions) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_relay_passes_answers_on_and_counts_tokens_as_sent_and_as_read() -> None:
    with completions() as target, counted(target) as (address, usage):

        def answer(prompt: list[Any] | str) -> Any:
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps({"prompt": prompt}).encode())
            with urllib.request.urlopen(request, timeout=60) as body:
                return json.loads(body.read())["usage"]["prompt_tokens"]

        assert [answer([1, 2, 3]), answer([[1, 2], [3]]), answer([9, 1])] == [3, 3, 3]
        assert [answer("text"), answer(["text"])] == [4, 4]
        with pytest.raises(urllib.error.HTTPError):
            answer([8])
        assert (usage.requests, usage.sent, usage.read, usage.generated, usage.unequal) == (3, 8, 9, 4, 1)


def test_the_memory_of_a_process_and_its_descendants_is_what_they_held_at_most() -> None:
    assert os.getpid() in family(os.getpid())
    assert os.getpid() in family(os.getppid())
    assert peak_gib(os.getpid()) > 0
