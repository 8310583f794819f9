"""Every prompt fills its token budget without exceeding it; a sample depends only on task, seed and index."""

import math
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruler_problems import FILLED, KINDS, TASKS, load_task, prompts
from tokenizers import processors

from sbeval.errors import UserError
from sbeval.model_adapters.encoding import encode_prompts
from sbeval.model_adapters.options import AdapterOptions
from sbeval.tasks.draws import seeded_order, seeded_ranks
from sbeval.tasks.ruler.drafts import Frame, prompt_text
from tests.marks import exhaustive

LONGEST = 131_072
OF_EACH_KIND = (
    "sb_niah_multikey_2",
    "sb_niah_multivalue",
    "sb_ruler_vt",
    "sb_ruler_fwe",
    "sb_ruler_qa_squad",
)


@pytest.fixture(scope="session")
def task_of(folder, corpora) -> Any:
    @cache
    def load(name: str, kind: str) -> Any:
        lengths = {"context_lengths": [LONGEST], "num_samples": 20 if name == "sb_many_shot_file" else 60}
        files = {"tokenizer": str(folder / kind), "examples_file": str(folder / "labelled.jsonl")}
        return load_task(name, {**corpora, **lengths, **files})

    return load


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILLED)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reach=st.floats(0, 1), index=st.integers(0, 23))
def test_prompts_fill_their_budget_and_no_more(task_of, name, kind, reach, index):
    check_budget(task_of(name, kind), reach, index)


@pytest.mark.parametrize(
    "name", [*OF_EACH_KIND[1:2], *exhaustive(*(name for name in FILLED if name != OF_EACH_KIND[1]))]
)
def test_prompts_fill_the_longest_length(task_of, name):
    check_budget(task_of(name, "character"), 1.0, 5)


@pytest.mark.parametrize("name", ["sb_many_shot_file", "sb_longbench2_short"])
def test_pieces_whose_counts_do_not_add_up_are_counted_as_one_prompt(task_of, name):
    for reach in (0.0, 0.4, 0.8):
        check_budget(task_of(name, "sentencepiece"), reach, 5)


def check_budget(task: Any, reach: float, index: int) -> None:
    """Compares the estimated size of prompts at several lengths with the token count of the whole prompt."""
    index %= task.num_samples
    least = task.sizes.filler(300, Frame()).minimum_length([index])
    length = round(math.exp(math.log(least) + reach**3 * (math.log(LONGEST) - math.log(least))))
    size = task.sizes.filler(length, Frame()).sizes([index])[index]
    draft = task.generator.draft(index, length)
    tokenizer = task.counter.tokenizer

    def whole(units: int) -> int:
        return len(tokenizer(prompt_text(draft, units, Frame()))["input_ids"])

    assert size.prompt_tokens == whole(size.units)
    assert size.prompt_tokens + task.generated_tokens <= length
    if draft.most_units is None or size.units < draft.most_units:
        room = length - task.generated_tokens - size.prompt_tokens
        assert room <= max(whole(size.units + 1) - size.prompt_tokens, 0.01 * length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILLED)
def test_one_token_below_the_minimum_is_refused_with_the_minimum(task_of, name, kind):
    task = task_of(name, kind)
    least = task.sizes.filler(300, Frame()).minimum_length([3])
    task.sizes.filler(least, Frame()).sizes([3])
    with pytest.raises(UserError, match=f"needs at least {least} tokens"):
        task.sizes.filler(least - 1, Frame()).sizes([3])


@pytest.mark.parametrize("name", ["sb_niah_single_1", "sb_niah_multiquery", "sb_ruler_qa_squad"])
def test_depths_in_tokens_are_where_the_needles_stand(task_of, name):
    task = task_of(name, "character")
    size = task.sizes.filler(5000, Frame()).sizes([2])[2]
    draft = task.generator.draft(2, 5000)
    prompt = prompt_text(draft, size.units, Frame())
    for depth in size.depths_tokens:
        around = prompt[depth : depth + 1000].lstrip()
        assert around.startswith(("One of the special magic", "Document")), around[:60]
        assert any(reference in around for reference in draft.references)


def test_system_text_and_chat_template_are_in_the_budget(folder, corpora):
    metadata = {"tokenizer": str(folder / "byte_level_bpe"), "context_lengths": [1024], "num_samples": 3}
    task = load_task("sb_niah_single_1", metadata)

    def template(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = "".join(f"<|{message['role']}|>\n{message['content'].strip()}" for message in messages)
        return text + ("<|assistant|>" if add_generation_prompt else "")

    chat = prompts(task, system_instruction="Be brief. " * 20, apply_chat_template=True, chat_template=template)
    for prompt in chat:
        assert prompt.startswith("<|system|>\nBe brief. ")
        assert "<|user|>\nA special magic number" in prompt
        assert "<|assistant|>\nThe special magic number" in prompt
        assert 1024 - 60 < len(task.counter.tokenizer(prompt)["input_ids"]) + 128 <= 1024


TEMPLATE = (
    "[gMASK]<s>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ '\n' if not loop.last }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("options", [{}, {"answer_prefix": False}, {"thinking_tokens": 600}], ids=str)
@pytest.mark.parametrize("name", ["sb_ruler_qa_squad", *exhaustive("sb_json_kv", "sb_niah_multiquery", "sb_ruler_cwe")])
def test_a_length_is_the_whole_prompt_as_the_model_reads_it(folder, corpora, name, options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "sentencepiece")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]"]})
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[gMASK]", "<s>")]
    own = processors.TemplateProcessing(single="[gMASK] <s> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = own
    tokenizer.chat_template = TEMPLATE
    task = load_task(name, {**corpora, "tokenizer": tokenizer, "context_lengths": [2500], "num_samples": 4, **options})

    def template(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        given = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        thinks = {"enable_thinking": "thinking_tokens" in options}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given, **thinks))

    whole = prompts(task, apply_chat_template=True, chat_template=template)
    lm: Any = SimpleNamespace(tokenizer=tokenizer, add_bos_token=None, options=AdapterOptions())
    for prompt, instance in zip(whole, task.instances, strict=True):
        prefix, given = task.generator.draft(instance.doc["index"], 2500).answer_prefix, instance.args[1]
        end = {"answer_prefix": "<|assistant|>\n", "thinking_tokens": "<|assistant|>\n<think>\n"}
        assert prompt.endswith(end.get(next(iter(options), ""), f"<|assistant|>\n{prefix}"))
        assert given.get("answer_prefix") == (prefix if "thinking_tokens" in options else None)
        (tokens,) = encode_prompts(lm, [prompt + given.get("answer_prefix", "")], quiet=True)
        assert tokens[:2] == [token for _, token in special]
        assert tokens[2] not in tokens[:2]
        assert instance.doc["prompt_tokens"] == [len(tokens)]
        assert 2500 - 400 < len(tokens) + task.generated_tokens <= 2500


STEPS = {"sb_niah_single_1": 25, "sb_niah_multikey_1": 500, **dict.fromkeys(("sb_ruler_vt", "sb_ruler_cwe"), 10)}
STEPS["sb_ruler_qa_squad"] = 10


@pytest.mark.parametrize("name", [*STEPS, "sb_ruler_fwe"])
def test_nvidias_scripts_start_at_the_first_units_and_go_down(folder, corpora, name):
    metadata = {**corpora, "tokenizer": str(folder / "byte_level_bpe"), "context_lengths": [8192]}
    full, stepped = (
        load_task(name, {**metadata, "num_samples": 12, **scripts}).sizes.filler(8192, Frame()).sizes(range(12))
        for scripts in ({}, {"scripts": "nvidia"})
    )
    budget = 8192 - load_task(name, {**metadata, "num_samples": 1}).generated_tokens
    step = STEPS.get(name, budget // 32)
    first = stepped[0].units
    if name == "sb_ruler_fwe":
        assert (first - budget // 6) % step == 0
        assert first <= full[0].units < first + step
    else:
        assert first == full[0].units
    for index, size in stepped.items():
        assert size.prompt_tokens <= budget
        assert (first - size.units) % step == 0
        assert size.units <= full[index].units
        assert size.units == first or size.units + step > full[index].units


def test_below_4096_tokens_nvidias_scripts_take_smaller_steps_of_lines(folder):
    metadata = {"tokenizer": str(folder / "byte_level_bpe"), "context_lengths": [2048, 4096], "num_samples": 1}
    for name, steps in (("sb_niah_single_1", [5, 25]), ("sb_ruler_vt", [5, 10])):
        generator = load_task(name, metadata).generator
        assert [generator.steps(length).units for length in (2048, 4096)] == steps


def test_nvidias_variable_tracking_is_spelt_right_and_ends_with_a_space(folder):
    metadata = {"tokenizer": str(folder / "byte_level_bpe"), "context_lengths": [4096], "num_samples": 1}
    ours, theirs = (prompts(load_task("sb_ruler_vt", {**metadata, **more})) for more in ({}, {"scripts": "nvidia"}))
    assert ours[0].endswith("they are:")
    assert theirs[0].endswith("variables are assigned the value " + theirs[0].rsplit(" ", 4)[1] + " they are: ")
    assert "assgined" in ours[0]
    assert "assgined" not in theirs[0]


def test_nvidias_documents_stand_in_one_order_for_every_question(folder, corpora):
    metadata = {**corpora, "tokenizer": str(folder / "byte_level_bpe"), "context_lengths": [4096]}
    task = load_task("sb_ruler_qa_squad", {**metadata, "num_samples": 12, "scripts": "nvidia"})
    places = list(range(20))
    random.Random(42).shuffle(places)
    for index in range(12):
        draft = task.generator.draft(index, 4096)
        assert draft.body(20).split("\n\n")[places.index(0)].partition("\n")[2] == draft.documents[draft.order[0]]
    assert task.task_record.scripts == "nvidia"


LENGTHS = [2600, 4000]


@pytest.fixture
def metadata(folder, corpora) -> dict[str, Any]:
    return {**corpora, "tokenizer": str(folder / "byte_level_bpe"), "num_samples": 8}


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *exhaustive(*sorted({*TASKS} - {*OF_EACH_KIND}))])
def test_a_request_does_not_depend_on_other_lengths_samples_tasks_or_global_state(
    name, metadata, tmp_path, monkeypatch
):
    both = load_task(name, {**metadata, "context_lengths": LENGTHS})
    both.build_all_requests(limit=3, rank=0, world_size=1)
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path))
    random.seed(7)
    np.random.seed(7)
    if name == "sb_ruler_vt":
        prompts(load_task("sb_niah_single_1", {**metadata, "context_lengths": [3000]}), limit=1)
    alone = load_task(name, {**metadata, "context_lengths": LENGTHS[1:], "num_samples": 5})
    alone.build_all_requests(samples=[2], rank=0, world_size=1)
    assert [instance.args for instance in alone.instances] == [both.instances[5].args]  # the cache key depends on it


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *exhaustive(*sorted({*TASKS} - {*OF_EACH_KIND}))])
def test_samples_differ_and_the_seed_matters(name, metadata):
    lengths = {"context_lengths": [2600]}
    first = prompts(load_task(name, {**metadata, **lengths}), limit=3)
    assert len(set(first)) == 3
    assert not set(first) & set(prompts(load_task(name, {**metadata, **lengths, "seed": 43}), limit=3))


@pytest.mark.parametrize("name", TASKS)
def test_lengths_share_questions_answers_and_relative_depths(name, metadata):
    task = load_task(name, {**metadata, "context_lengths": LENGTHS})
    task.build_all_requests(limit=4, rank=0, world_size=1)
    for doc in list(task.eval_docs)[:4]:
        short, long = (task.generator.draft(doc["index"], length) for length in LENGTHS)
        assert list(short.references) == list(long.references) == doc["references"]
        assert (short.closing, short.answer_prefix) == (long.closing, long.answer_prefix)
        if "qa" not in name:
            assert doc["depths_percent"][0] == doc["depths_percent"][1]


@pytest.mark.parametrize("name", TASKS)
def test_the_haystack_of_a_shorter_prompt_is_part_of_the_longer_one(name, metadata):
    task = load_task(name, {**metadata, "context_lengths": LENGTHS})
    for index in range(2):
        units = [task.sizes.filler(length, Frame()).sizes([index])[index].units for length in LENGTHS]
        drafts = [task.generator.draft(index, length) for length in LENGTHS]
        assert units[0] < units[1]
        if hasattr(drafts[0], "haystack"):
            short, long = (draft.haystack.text(0, count) for draft, count in zip(drafts, units, strict=True))
            assert long.startswith(short)
        else:
            bodies = [draft.body(count) for draft, count in zip(drafts, units, strict=True)]
            short, long = ([word for word in body.split() if not word[0].isdigit()] for body in bodies)
            remaining = iter(long)
            assert all(word in remaining for word in short), "the shorter list is no subsequence of the longer one"


def test_a_depth_grid_is_gone_through_in_turn(metadata):
    for name in ("sb_niah_single_1", "sb_niah_multikey_1"):
        task = load_task(name, {**metadata, "context_lengths": [1200, 2000], "depths": 5})
        task.build_all_requests(limit=6, rank=0, world_size=1)
        depths = [doc["depths_percent"] for doc in list(task.eval_docs)[:6]]
        assert depths == [[[percent], [percent]] for percent in (0.0, 25.0, 50.0, 75.0, 100.0, 0.0)]


def test_kept_sizes_give_the_same_prompts(metadata):
    for name in ("sb_niah_multikey_2", "sb_ruler_cwe"):
        first, second = (prompts(load_task(name, {**metadata, "context_lengths": LENGTHS})) for _ in range(2))
        assert first == second


@given(st.integers(1, 300), st.integers(0, 5))
def test_an_order_is_a_permutation(count, seed):
    assert sorted(seeded_order(count, "x", seed).tolist()) == list(range(count))


@given(st.sets(st.integers(0, 10**12), min_size=1), st.integers(0, 5))
def test_ranks_of_numbers_do_not_depend_on_the_others(numbers, seed):
    listed = np.array(sorted(numbers))
    ranks = seeded_ranks(listed, "x", seed)
    assert len(set(ranks.tolist())) == len(numbers)
    assert seeded_ranks(listed[:1], "x", seed)[0] == ranks[0]
