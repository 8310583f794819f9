"""A model whose logits are no numbers gets no number: every task names the request, or records null where asked to."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from ruler_problems import write_inputs

import sbeval.tasks
from sbeval.errors import UserError
from sbeval.model_adapters.lm import StickBreakingLM
from sbeval.models import SbevalConfig
from sbeval.models.slots import SlotCache
from sbeval.scoring.non_finite import NonFiniteError
from tests.model_adapters.runs.test_data_parallel import COMMON
from tests.model_adapters.runs.test_data_parallel import TASKS as OF_LM_EVAL
from tests.model_adapters.small import cache_argument, generated, instances, load_lm, t5

PROTOCOLS = [f"sb_text_{protocol}" for protocol in ("stream", "rolling", "sliding", "fixed_target", "position")]
RECALL = ["sb_niah_single_1_forced", "sb_mqrar", "sb_mqrar_text", "sb_flipflop"]
GENERATED = ["sb_niah_single_1", "sb_ruler_vt", "small_generation", "small_samples", "small_beams"]
TASKS = [*GENERATED, "sb_span", "small_choice", "small_greedy", "small_rolling", *PROTOCOLS, *RECALL]
FURTHER = {
    "small_samples": OF_LM_EVAL["small_generation"].replace("until:", "do_sample: true, temperature: 1.0, until:"),
    "small_beams": OF_LM_EVAL["small_generation"].replace("until:", "num_beams: 2, until:"),
    "small_greedy": """
output_type: loglikelihood
doc_to_text: "{{text[:20]}}"
doc_to_target: "{{text[20:30]}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
}
RARE = "Ω"
LINES = ["Beautiful is better than ugly, and implicit is not.", f"Explicit is {RARE} better than implicit, as ever."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_inputs(folder)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    (folder / "text.txt").write_text(LINES[0] * 200)
    (folder / "tasks").mkdir()
    for name, body in {**OF_LM_EVAL, **FURTHER}.items():
        (folder / "tasks" / f"{name}.yaml").write_text(COMMON.format(name=name, data=folder / "data.jsonl") + body)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SbevalConfig(attention="stickbreaking", vocab_size=700, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "byte_level_bpe")
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBEVAL_CACHE", str(folder / "cache"))
        yield


@pytest.fixture(scope="module")
def tasks(folder: Path, environment: None) -> dict[str, Any]:
    return {name: load_tasks(folder, [name], "error")["tasks"][name] for name in TASKS}


def load_tasks(folder: Path, names: list[str], non_finite: str) -> dict[str, Any]:
    files = {"pretrained": "byte_level_bpe", "data_path": "text.txt", "essays": "essays"}
    metadata: dict[str, Any] = {key: str(folder / name) for key, name in files.items()}
    metadata |= {"non_finite": non_finite, "context_lengths": [32, 64], "max_length": 2048, "ignore_share": 0.0}
    metadata |= {"num_samples": 2, "pairs": [2], "queries": 4}
    own: dict[str, Any] = {
        "sb_niah_single_1": {"context_lengths": [640]},
        "sb_niah_single_1_forced": {"context_lengths": [640]},
        "sb_ruler_vt": {"context_lengths": [1280]},
        "sb_mqrar": {"context_lengths": [768], "vocabulary": 64},
        "sb_mqrar_text": {"context_lengths": [1280]},
        "sb_flipflop": {"context_lengths": [512]},
    }
    manager = TaskManager(
        include_path=[*map(str, sbeval.tasks.__path__), str(folder / "tasks")],
        include_defaults=False,
        metadata=metadata | {name: own[name] for name in names if name in own},
    )
    return manager.load(names)


def load(folder: Path, **options: Any) -> StickBreakingLM:
    return load_lm(folder / "byte_level_bpe", max_length=2048, batch_size=4, **options)


def poison_logits(value: float, tokens: Any = 7) -> Callable[[Any], None]:
    def poison(model: Any) -> None:
        def change(module: Any, arguments: Any, logits: torch.Tensor) -> None:
            logits[..., tokens] = value

        model.get_output_embeddings().register_forward_hook(change)

    return poison


def poison_weight(name: str, value: float) -> Callable[[Any], None]:
    def poison(model: Any) -> None:
        with torch.no_grad():
            dict(model.named_parameters())[name].flatten()[0] = value

    return poison


def overflow(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "up_proj" in name or "gate_proj" in name or "down_proj" in name:
                parameter.fill_(1e30)


FAULTS: dict[str, Callable[[Any], None]] = {
    "one logit is NaN": poison_logits(math.nan),
    "one logit is infinite": poison_logits(math.inf),
    "every logit is minus infinity": poison_logits(-math.inf, slice(None)),
    "a weight of the first layer's MLP is NaN": poison_weight("model.layers.0.mlp.down_proj.weight", math.nan),
    "a weight of the last layer's values is NaN": poison_weight("model.layers.1.self_attn.v_proj.weight", math.nan),
    "a weight of the last layer's queries is NaN": poison_weight("model.layers.1.self_attn.q_proj.weight", math.nan),
    "bf16 overflows": overflow,
}


@pytest.fixture(scope="module", params=FAULTS)
def broken(request: pytest.FixtureRequest, folder: Path) -> StickBreakingLM:
    lm = load(folder, dtype="bfloat16" if "bf16" in request.param else "float32")
    FAULTS[request.param](lm.model)
    return lm


@pytest.mark.parametrize("name", TASKS)
def test_the_request_position_and_length_are_named(name: str, broken: StickBreakingLM, tasks: dict[str, Any]) -> None:
    task = tasks[name]
    task.build_all_requests(limit=2, rank=0, world_size=1)
    requests = task.instances
    with pytest.raises(NonFiniteError) as raised:
        getattr(broken, requests[0].request_type)(requests, disable_tqdm=True)
    place = rf"position \d+ of an input of \d+ tokens.* in request \d+ of document [01] of {name}: try dtype"
    assert re.search(place, str(raised.value)) or "at the last position of an input" in str(raised.value)


def poison_step(position: int) -> Callable[[Any], None]:
    """Makes the logits after this many tokens NaN, and those that follow."""

    def poison(model: Any) -> None:
        def change(module: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
            cache = cache_argument(keywords)
            if isinstance(cache, SlotCache):
                output.logits[cache.position_B + 1 >= position] = math.nan
            elif cache is not None and cache.get_seq_length() >= position:
                output.logits[:, -1] = math.nan

        model.register_forward_hook(change, with_kwargs=True)

    return poison


def generate(lm: StickBreakingLM, *prompts: str, **settings: Any) -> list[str]:
    setting = {"until": [], "max_gen_toks": 6, **settings}
    return generated(lm, [(prompt, setting) for prompt in prompts])


def test_a_step_of_an_answer_is_named(folder: Path) -> None:
    lm = load(folder)
    prompt_tokens = len(lm.tokenizer("some words")["input_ids"])
    poison_step(prompt_tokens + 3)(lm.model)
    place = rf"token 4 of the answer, after position {prompt_tokens + 2} of an input of {prompt_tokens + 3} tokens"
    with pytest.raises(NonFiniteError, match=place):
        generate(lm, "some words")
    assert len(generate(lm, "some words", max_gen_toks=3)) == 1


def test_what_follows_a_complete_answer_is_not_looked_at(folder: Path) -> None:
    """Of two answers in a batch one ends first; it goes on for the other's sake."""
    lm = load(folder)
    end = generate(lm, "some words", max_gen_toks=3)[0][-1:]
    (short,) = generate(lm, "some words", until=[end])
    poison_step(len(lm.tokenizer("some words")["input_ids"]) + 3)(lm.model)
    assert generate(lm, "some words", "some words", until=[end]) == [short, short]


def test_a_generation_config_cannot_hide_them(folder: Path) -> None:
    lm = load(folder)
    lm.model.generation_config.remove_invalid_values = True
    poison_logits(math.nan)(lm.model)
    with pytest.raises(NonFiniteError):
        generate(lm, "some words")


@pytest.mark.parametrize("name", ["small_generation", "small_choice", "small_rolling"])
def test_of_a_batch_only_the_row_is_named_and_the_rest_kept(name: str, folder: Path, tasks: dict[str, Any]) -> None:
    lm, kept = load(folder), []
    lm.session.cache_hook.add_partial = lambda *given: kept.append(given)  # type: ignore[union-attr]
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[lm.tokenizer(RARE)["input_ids"][-1]] = math.nan
    task = tasks[name]
    task.build_all_requests(limit=2, rank=0, world_size=1)
    with pytest.raises(NonFiniteError, match=f"document 1 of {name}"):
        getattr(lm, task.instances[0].request_type)(task.instances, disable_tqdm=True)
    if name == "small_generation":
        assert [arguments[0] for _, arguments, _ in kept] == [LINES[0]]


UNTOUCHED = re.compile(r"chance|ci95|_stderr|name|alias")


def numbers(value: Any) -> list[float]:
    """The numbers of a metric that rest on answers, NaN for null; whole numbers count or name something."""
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    return [math.nan if value is None else value] if value is None or isinstance(value, float) else []


def run(folder: Path, lm: StickBreakingLM, names: list[str]) -> dict[str, dict[str, list[float]]]:
    results = evaluate(
        lm=lm, task_dict=load_tasks(folder, names, lm.opened.options.non_finite), limit=2, bootstrap_iters=4
    )
    of_tasks = {name: results["results"][name].items() for name in names}
    return {name: {key: numbers(of) for key, of in own if not UNTOUCHED.search(key)} for name, own in of_tasks.items()}


def test_null_is_recorded_in_every_metric_where_it_is_asked_for(folder: Path, environment: None) -> None:
    lm = load(folder, non_finite="null")
    poison_logits(math.nan)(lm.model)
    for name, found in run(folder, lm, TASKS).items():
        values = [number for metric in found.values() for number in metric]
        assert values, name
        assert all(map(math.isnan, values)), (name, found)


@pytest.mark.exhaustive
def test_null_takes_no_number_from_other_lengths_and_documents(folder: Path, environment: None) -> None:
    names = [*TASKS[:3], "small_choice", *PROTOCOLS]
    sound = run(folder, load(folder, non_finite="null"), names)
    assert sound == run(folder, load(folder), names)
    assert not any(math.isnan(number) for found in sound.values() for metric in found.values() for number in metric)
    lm = load(folder, non_finite="null")

    def change(module: Any, arguments: Any, embedded: torch.Tensor) -> None:
        embedded[:, 32:] = math.nan

    lm.model.get_input_embeddings().register_forward_hook(change)
    for name, found in run(folder, lm, PROTOCOLS).items():
        for key, values in found.items():
            if "@0000032" in key:
                assert values == pytest.approx(sound[name][key]), (name, key)
            elif "@0000064" in key:
                assert all(map(math.isnan, values)), (name, key)


def test_an_encoder_decoder_model_is_watched_too(tmp_path: Path) -> None:
    lm = load_lm(t5(tmp_path), max_length=64)
    assert len(generate(lm, "a")) == 1
    poison_logits(math.nan)(lm.model)
    with pytest.raises(NonFiniteError, match="token 1 of an answer"):
        generate(lm, "a")
    with pytest.raises(NonFiniteError, match="in request 0 of document 0 of task"):
        lm.loglikelihood(instances("loglikelihood", [("a", " b")]), disable_tqdm=True)
    with pytest.raises(NonFiniteError, match="in request 0 of document 0 of task"):
        lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("a b",)]), disable_tqdm=True)
    with pytest.raises(UserError, match="non_finite=null does not work with an encoder-decoder model"):
        load_lm(tmp_path, max_length=64, non_finite="null")
