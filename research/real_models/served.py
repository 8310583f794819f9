"""vLLM's completions server on a loopback port, and a relay before it that counts the tokens of every request."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

READY_SECONDS = 900
ANSWER_SECONDS = 900
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
VLLM_ENVIRONMENT: Mapping[str, str] = {**VLLM_VARIABLES, **os.environ}
"""What vLLM runs with; a variable that the user set stays."""


@dataclass(kw_only=True)
class Usage:
    """Token counts of requests, as they were sent and as the server's `usage` counts them.

    A request with a text, by which sbeval compares tokenizers, is left out.

    Attributes:
        requests: number of requests.
        sent: prompt tokens that were sent.
        read: prompt tokens by `usage`.
        generated: generated tokens by `usage`.
        unequal: requests whose two counts of prompt tokens differ.
    """

    requests: int = 0
    sent: int = 0
    read: int = 0
    generated: int = 0
    unequal: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, sent: int, usage: Mapping[str, int]) -> None:
        """Counts one request with `sent` prompt tokens."""
        with self.lock:
            self.requests += 1
            self.sent += sent
            self.read += usage["prompt_tokens"]
            self.generated += usage["completion_tokens"]
            self.unequal += usage["prompt_tokens"] != sent


def prompt_tokens(body: Mapping[str, Any]) -> int | None:
    """Returns how many tokens the prompts of a completions request have, None where they are texts."""
    prompt = body["prompt"]
    prompts = prompt if isinstance(prompt[0], list | str) and not isinstance(prompt, str) else [prompt]
    return None if any(isinstance(of, str) for of in prompts) else sum(map(len, prompts))


class _Relay(ThreadingHTTPServer):
    """Passes requests on to a server and counts their tokens."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relaying)
        self.target = target
        self.usage = Usage()


class _Relaying(BaseHTTPRequestHandler):
    server: _Relay

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        request = urllib.request.Request(self.server.target + self.path, sent, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                status, body = answer.status, answer.read()
            if (tokens := prompt_tokens(json.loads(sent))) is not None:
                self.server.usage.add(tokens, json.loads(body)["usage"])
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def counted(target: str) -> Iterator[tuple[str, Usage]]:
    """Yields the address of a relay to the server at `target`, and the counts of what passes through it."""
    with _Relay(target) as relay:
        thread = threading.Thread(target=relay.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{relay.server_port}", relay.usage
        finally:
            relay.shutdown()
            thread.join()


def free_port() -> int:
    """Returns a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(model: Path, log: Path, max_tokens: int, options: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Yields the address of vLLM's server with the model and its process id, and ends the server."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", str(max_tokens), *options]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(command, env={**VLLM_ENVIRONMENT}, stdout=output, stderr=output)
        try:
            _wait_until_ready(f"{address}/v1/models", server, log)
            yield address, server.pid
        finally:
            server.terminate()
            server.wait()


def _wait_until_ready(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    started = time.monotonic()
    while time.monotonic() - started < READY_SECONDS:
        if server.poll() is not None:
            raise SystemExit(f"vLLM's server ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                print(f"vLLM's server was ready after {time.monotonic() - started:.0f} s", flush=True)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"vLLM's server was not ready after {READY_SECONDS} s: see {log}")
