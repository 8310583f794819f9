"""A server spoils any field of its answers at random: numbers stay what they were, or one sentence refuses them."""

import contextlib
import copy
import importlib
import json
import logging
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import requests
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from scoring_servers import CompletionsServer, completions_server

from sbeval import plugin
from sbeval.errors import UserError
from sbeval.scoring.returned import PromptBatch, check_scores, check_texts
from tests.model_adapters.small import english

plugin.complete_imports()
importlib.import_module("lm_eval.models.api_models")  # with its packages, before a test hides one
SPOILED = int(os.environ.get("SBEVAL_SPOILED_ANSWERS", "150"))
JUNK: list[Any] = [None, "", "x", [], {}, True, 0, -1, 7, 0.0, 3.7, -0.5, -9999.0, 1e9, -1e300]
JUNK += [float("nan"), float("inf"), float("-inf"), [None], {"x": -1.0}, "-1.5", 10**400]
FIELDS = ("choices", "index", "logprobs", "token_logprobs", "top_logprobs", "tokens", "usage", "prompt_tokens")


@pytest.fixture
def server(checkpoint) -> Iterator[CompletionsServer]:
    for package in ("tenacity", "aiohttp"):
        pytest.importorskip(package, reason="the extra sbeval[api] brings it")
    with completions_server(checkpoint("rope", adds_bos=True)) as running:
        yield running


def over(server: CompletionsServer, **options: Any) -> Any:
    return get_model("local-completions")(**server.arguments | options)


def windows(server: CompletionsServer) -> list[tuple[None, list[int], list[int]]]:
    """Prompts of equal lengths, some alike but for one token; one continuation each is the most probable token."""
    tokens = server.tokenizer(english(), add_special_tokens=False)["input_ids"]
    starts = [tokens[begin : begin + 20] for begin in (0, 0, 20, 40, 40, 60)]
    return [(None, [0, *text[:-count]], text[-count:]) for text, count in zip(starts, (1, 4, 3, 2, 5, 6), strict=True)]


def places(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields every value of a JSON text with its holder and the key or place in it, and the nearest named key."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in pairs:
        yield node, key, value
        yield from places(value)


def below(body: dict[str, Any], field: str) -> list[tuple[Any, Any, Any]]:
    named = [(holder, key, value) for holder, key, value in places(body) if key == field]
    return [*named, *(place for _, _, value in named for place in places(value))]


def spoil(body: dict[str, Any], draw: random.Random) -> str:
    """Spoils one field in place, and returns how.

    An answer that another model could have given is none: the best alternative is never left out.
    """
    field = draw.choice(FIELDS)
    holder, key, value = draw.choice(below(body, field))
    inside = isinstance(holder, list) and len(holder) > 1
    ways: list[Callable[[], object]] = [lambda: holder.__setitem__(key, draw.choice(JUNK))]
    is_alternatives = isinstance(holder, dict) and all(isinstance(of, float) for of in holder.values())
    if not is_alternatives:
        ways.append(lambda: holder.pop(key))
    if inside:
        other = draw.randrange(len(holder))
        ways += [
            lambda: holder.__setitem__(slice(key, key), [copy.deepcopy(value)]),
            lambda: holder.__setitem__(
                slice(None), [holder[other] if at == key else of for at, of in enumerate(holder)]
            ),
            lambda: holder.reverse(),
            lambda: holder.__setitem__(slice(None), [*holder[1:], holder[0]]),
            lambda: holder.__setitem__(slice(None), [holder[-1], *holder[:-1]]),
            lambda: holder.__delitem__(slice(draw.randrange(len(holder)), None)),
            lambda: holder.__setitem__(slice(None), [holder[0], *[0.0] * (len(holder) - 1)]),
        ]
    if isinstance(value, float):
        ways.append(lambda: holder.__setitem__(key, value + draw.choice([-1, 1]) * 10 ** draw.uniform(-4, 2)))
    choices = body["choices"]
    if len(choices) > 1 and field in ("choices", "index", "logprobs", "token_logprobs", "top_logprobs", "tokens"):
        one, another = draw.sample(choices, 2)
        held = (one, another) if field in one else (one["logprobs"], another["logprobs"])
        if field != "choices":
            ways.append(lambda: exchange(*held, field))
    way = draw.randrange(len(ways))
    ways[way]()
    return f"{field}: way {way}"


def exchange(one: dict[str, Any], another: dict[str, Any], field: str) -> None:
    one[field], another[field] = another[field], one[field]


RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "llama_server.json").read_text(encoding="utf-8"))
RECORDED.pop("server")
GENERATED_ONLY = {"tokens": ["\n"], "token_logprobs": [-1.25], "top_logprobs": [{"\n": -1.25}], "text_offset": [0]}
LLAMA_SERVER = {  # the shapes that earlier servers of llama.cpp answered in, prompts left out
    "the generated token alone": GENERATED_ONLY,
    "zeros": {
        "tokens": [*"a real text", "\n"],
        "token_logprobs": [None, *[0.0] * 11],
        "top_logprobs": [None, *({letter: 0.0} for letter in "real text..")],
        "text_offset": [*range(12)],
    },
    "nothing": None,
}
NO_ECHO = r"http://127.0.0.1.*echo=True.*llama.cpp does not"


def llama_answers() -> dict[str, tuple[list[list[int]], dict[str, Any]]]:
    """Returns prompts and the answer to them by name."""
    answers = {}
    for shape, told in LLAMA_SERVER.items():
        choice = {"index": 0, "text": "\n", "finish_reason": "length", "logprobs": told}
        usage = {"prompt_tokens": 11, "completion_tokens": 1}
        answers[shape] = [[*range(11)]], {"choices": [choice], "usage": usage, "object": "text_completion"}
    for name in ("of tokens", "of two prompts"):
        answers[name] = RECORDED[name]["request"]["prompt"], RECORDED[name]["answer"]
    return answers


@pytest.mark.parametrize("name", llama_answers())
def test_a_server_that_does_not_score_prompts_is_refused_by_name(name):
    prompts, body = llama_answers()[name]
    asked = PromptBatch("local-completions at http://127.0.0.1:8080", prompts, [1] * len(prompts), of_completions=True)
    with pytest.raises(UserError, match=f"local-completions at {NO_ECHO}"):
        check_scores(body, asked)


class _Llama(BaseHTTPRequestHandler):
    """Answers as it is told; None is an error, as of a server that refuses `echo`."""

    answer: ClassVar[Any] = None

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b"Only no echo is supported" if self.answer is None else json.dumps(self.answer).encode()
        self.send_response(500 if self.answer is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def llama_server(answer: Any) -> Iterator[Any]:
    """Yields lm-eval's model `gguf` over a server that gives the same answer to every request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("_", (_Llama,), {"answer": answer})) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield get_model("gguf")(base_url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


GGUF_ANSWERS = {
    "recorded": RECORDED["of a text"]["answer"],
    "no choices": {"error": "x"},
    **{shape: body for shape, (_, body) in llama_answers().items() if shape in LLAMA_SERVER},
}


@pytest.mark.parametrize("name", GGUF_ANSWERS)
def test_gguf_refuses_a_server_that_does_not_score_prompts(name):
    with llama_server(GGUF_ANSWERS[name]) as lm, pytest.raises(UserError, match=f"gguf at {NO_ECHO}"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("a real", " text"), 0)], disable_tqdm=True)


def test_gguf_says_which_server_refuses_echo():
    with llama_server(None) as lm, pytest.raises(UserError, match=f"gguf at {NO_ECHO}"):
        lm.gguf_completion("a real", " text", retries=1, delay=0)


def echoed() -> dict[str, Any]:
    """Returns an answer with the shape of llama-cpp-python's server."""
    told = {
        "tokens": ["a", " real", " text", "\n"],
        "text_offset": [0, 1, 6, 11],
        "token_logprobs": [None, -3.0, -1.5, -0.5],
        "top_logprobs": [None, {" good": -1.0, " real": -3.0}, {" text": -1.5}, {"\n": -0.5}],
    }
    return {"choices": [{"index": 0, "text": "a real text\n", "logprobs": told}]}


def test_gguf_adds_up_a_right_answer():
    with llama_server(echoed()) as lm:
        requests = [Instance("loglikelihood", {}, ("a real", " text"), 0)]
        assert lm.loglikelihood(requests, disable_tqdm=True) == [(-1.5, True)]
        assert lm.generate_until([Instance("generate_until", {}, ("a", {"until": ["."]}), 0)]) == ["a real text"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_logprobs", [None, -3.0, 0.5, -0.5]),
        ("token_logprobs", [None, -3.0, None, -0.5]),
        ("token_logprobs", [-3.0, -1.5, -0.5, None]),
        ("token_logprobs", [None, -3.0, -9999.0, -0.5]),
        ("token_logprobs", [None, -3.0, -1.5]),
        ("token_logprobs", [None, -3.0, -0.2, -0.5]),
        ("text_offset", [0, 1, 2, 3]),
        ("text_offset", [0, 6, 1, 11]),
        ("text_offset", None),
        ("top_logprobs", None),
        ("tokens", "abcd"),
    ],
)
def test_gguf_refuses_what_no_model_tells(field, value):
    body = echoed()
    body["choices"][0]["logprobs"][field] = value
    with llama_server(body) as lm, pytest.raises(UserError, match=r"Expected gguf at http://127\.0\.0\.1"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("a real", " text"), 0)], disable_tqdm=True)


@pytest.mark.parametrize("least", [-9999.0, -9984.0, -1e4, float("-inf"), -3.4028234663852886e38])
def test_what_stands_for_minus_infinity_is_refused_where_it_is_scored(least):
    told = {"token_logprobs": [None, least, -1.0, -2.0], "top_logprobs": [None, {"a": -0.5}, {"b": -0.7}, {"c": -2.0}]}
    body = {"choices": [{"index": 0, "logprobs": told}]}
    check_scores(body, PromptBatch("served", [[5, 6, 7]], [2]))
    with pytest.raises(UserError, match="for the token at position 1, which stands for minus infinity"):
        check_scores(body, PromptBatch("served", [[5, 6, 7]], [1]))


@pytest.mark.parametrize(
    ("choices", "found"),
    [
        ([{"index": 0, "text": "a"}], "Expected 2 answers"),
        ([{"index": 0, "text": "a"}] * 2, "Expected each index from 0 to 1 once"),
        ([{"index": 0, "text": "a"}, {"index": 1, "text": 3}], "Expected a generated text"),
        ([{"index": 0, "message": {"content": "a"}}, {"index": 1, "message": "b"}], "Expected a generated text"),
        ("ab", "Expected generated texts"),
    ],
)
def test_generated_texts_are_one_for_each_prompt(choices, found):
    with pytest.raises(UserError, match=f"{found}.* from served"):
        check_texts({"choices": choices}, 2, "served")
    check_texts({"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": None}]}, 2, "served")


def test_megabytes_of_an_answer_are_cut_in_the_log(caplog):
    logging.getLogger("lm_eval.models.api_models").warning("API request failed with error message: " + "x" * 2**20)
    assert len(caplog.messages[-1]) < 3000


def test_missing_packages_of_servers_are_one_sentence_that_names_the_extra(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(
        UserError, match=r"models of servers need tenacity, not installed: run pip install 'sbeval\[api\]'"
    ):
        over(server)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 6}], ids=str)
def test_a_spoiled_answer_changes_no_number(options, server):
    lm, asked = over(server, **options), windows(server)
    expected = lm._loglikelihood_tokens(asked, disable_tqdm=True)
    counts, kinds = Counter(), Counter()
    for seed in range(SPOILED):
        draw, how = random.Random(seed), []
        begun, at = len(server.asked), draw.randrange(len(asked))

        def spoiled(
            body: dict[str, Any], draw: random.Random = draw, how: list[str] = how, begun: int = begun, at: int = at
        ) -> Any:
            body = json.loads(json.dumps(body))
            if len(server.asked) > begun + at and not how:
                how.append(spoil(body, draw))
            return body

        server.spoil_body = spoiled
        try:
            found = lm._loglikelihood_tokens(asked, disable_tqdm=True)
        except UserError as error:
            counts["refused" if str(error).startswith("Expected") else "unclear"] += 1
            continue
        except requests.JSONDecodeError:  # with simplejson installed, requests does not read NaN
            counts["refused"] += 1
            continue
        same = all(a[0] == pytest.approx(b[0], abs=1e-6) and a[1] == b[1] for a, b in zip(found, expected, strict=True))
        counts["equal" if same else "wrong"] += 1
        kinds.update([] if same else [f"{seed}: {how}"])
    print(options, SPOILED, dict(counts))
    assert not counts["wrong"] + counts["unclear"], kinds
    assert counts["refused"] > counts["equal"] > 0
