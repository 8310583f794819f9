"""The tasks inside lm-eval: a model that reads the needle scores one, and files hold what a report needs."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.utils import handle_non_serializable
from partial_model import PartialModel
from ruler_problems import TASKS, evaluated, load_task

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord
from sbeval.scoring.requests import Answer
from sbeval.tasks.ruler import wording
from sbeval.tasks.ruler.drafts import Frame


class Reader(PartialModel):
    """Answers needle questions by reading the prompt, and everything else with nothing."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for prompt, settings in (request.args for request in requests):
            assert settings["until"] == []
            keys = re.split(r", and |, ", prompt.rpartition(" mentioned in the provided")[0].rpartition(" for ")[2])
            found = [v for key in keys for v in re.findall(rf"for {re.escape(key)} is: ([^\n]+?)\.(?:\s|$)", prompt)]
            answers.append("\x00 " + ", ".join(found).upper())
        return answers


@pytest.fixture
def metadata(folder, corpora) -> dict[str, Any]:
    run = {"context_lengths": [2000, 3000], "num_samples": 20}
    return {**corpora, **run, "tokenizer": str(folder / "byte_level_bpe")}


def evaluate(tasks: list[str], metadata: dict[str, Any], **options: Any) -> dict[str, Any]:
    return json.loads(json.dumps(evaluated(Reader(), tasks, metadata, **options), default=handle_non_serializable))


def test_a_reader_scores_one_at_every_length_and_groups_average(metadata):
    results = evaluate(["sb_ruler"], metadata, limit=2)
    for name in TASKS:
        own = results["results"][name]
        expected = 1.0 if "niah" in name else 0.0
        assert own["score@0002000,none"] == own["score@0003000,none"] == expected
        assert (own["score@0002000_stderr,none"], own["sample_len"]) == (0.0, 2)
        assert not any(value == -1 for value in own.values())
    for length in (2000, 3000):
        assert results["groups"]["sb_niah"][f"score@{length:07d},none"] == 1.0
        assert results["groups"]["sb_niah"][f"score@{length:07d}_stderr,none"] == 0.0
        own = [results["results"][name][f"score@{length:07d}_stderr,none"] for name in TASKS]
        pooled = sum(error**2 for error in own) ** 0.5 / len(own)
        assert results["groups"]["sb_ruler"][f"score@{length:07d}_stderr,none"] == pytest.approx(pooled)
    assert results["groups"]["sb_ruler"]["score@0003000,none"] == pytest.approx(8 / 13)


def test_samples_hold_raw_and_parsed_answers_references_tokens_and_depths(metadata):
    samples = evaluate(["sb_niah_single_1"], metadata, limit=3)["samples"]["sb_niah_single_1"]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2]
    for sample in samples:
        (value,) = sample["doc"]["references"]
        assert (sample["resps"], sample["filtered_resps"]) == ([[f"\x00 {value}"]] * 2, [value] * 2)
        assert sample["score@0002000"] == sample["score@0003000"] == 1.0
        assert sample["doc"]["lengths"] == [2000, 3000]
        assert [len(depths) for depths in sample["doc"]["depths_percent"]] == [1, 1]
        assert all(0 < 2000 - 128 - tokens < 200 for tokens in sample["doc"]["prompt_tokens"][:1])
        assert len(sample["arguments"]) == 2


def test_the_record_names_what_was_run_and_single_samples_can_be_chosen(metadata):
    results = evaluate(["sb_niah_single_2"], metadata, samples={"sb_niah_single_2": [5]})
    (sample,) = results["samples"]["sb_niah_single_2"]
    assert (sample["doc"]["index"], sample["score@0002000"]) == (5, 1.0)
    record = TaskRecord.from_json(results["configs"]["sb_niah_single_2"]["metadata"]["sbeval"])
    assert (record.family, record.protocol, record.corpus) == ("ruler", "niah_single_2", "essays")
    assert record.lengths == [2000, 3000]
    assert record.corpus_sha256 is not None
    assert "sentence rule 1" in str(record.corpus_detail)
    assert record.lm_eval_version == wording.lm_eval_version()


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("sb_niah_single_1", {"context_lengths": [100]}, "needs at least .* tokens of context"),
        ("sb_niah_single_1", {"context_lengths": ["4K"]}, "list of positive whole numbers of tokens, found"),
        ("sb_niah_single_1", {"context_lengths": []}, "list of positive whole numbers"),
        ("sb_niah_single_1", {"max_length": 2048}, "of 3000 tokens, only up to 2048, because the model's"),
        ("sb_niah_single_1", {"max_length": 3500, "thinking_tokens": 501}, "up to 2999, .* 3500 .* 501 of"),
        ("sb_niah_single_1_forced", {"answer_prefix": False}, "set answer_prefix=false only for other tasks"),
        ("sb_niah_single_1", {"depths": 1}, "Expected depths of sb_niah_single_1 to be"),
        ("sb_niah_single_1", {"num_samples": 0}, "num_samples of sb_niah_single_1 to be a whole number of at least 1"),
        ("sb_niah_single_1", {"type_haystack": "straw"}, "to be one of noise, needle, essay"),
        ("sb_niah_single_1", {"sb_niah_single_1": {"needles": 3}}, "found unknown key 'needles' in --metadata: known"),
        ("sb_niah_single_1", {"context_length": [2000]}, "expected context_lengths in --metadata"),
        ("sb_niah_single_1", {"type_haystak": "noise"}, "expected type_haystack in --metadata, found type_haystak"),
        ("sb_ruler_qa_hotpot", {"hotpotqa": "FILE"}, "expected hotpot in --metadata, found hotpotqa"),
        ("sb_niah_single_1", {"sb_ruler_vtt": {"num_hops": 6}}, "found sb_ruler_vtt; did you mean sb_ruler_vt"),
        ("sb_niah_single_1", {"sb_niah": {"depths": 5}}, "--metadata, found the group sb_niah"),
        ("sb_ruler_vt", {"sb_ruler_vt": {"depths": 5}}, "keys that sb_ruler_vt has, found unknown key 'depths'"),
        ("sb_ruler_qa_squad", {"sb_ruler_qa_squad": {"dataset": "hotpotqa"}}, "found unknown key 'dataset'"),
        ("sb_niah_single_1", {"tokenizer": None}, "none is named: name the model with --model_args"),
        ("sb_niah_single_2", {"essays": "/no/such/folder"}, "folder of them at /no/such/folder, and found none"),
        ("sb_niah_single_2", {"num_needle_k": 41}, "40 depths in essays"),
        ("sb_ruler_fwe", {"alpha": 1}, "alpha of sb_ruler_fwe to be a number above 1"),
        ("sb_ruler_fwe", {"vocab_size": 4}, "vocab_size has to be at least 5"),
        ("sb_ruler_qa_squad", {"squad": "/no/such/file"}, "There is no corpus file at /no/such/file"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(metadata, task, options, message):
    with pytest.raises(UserError, match=message) as raised:
        load_task(task, {**metadata, **options})
    assert "\n" not in str(raised.value)


def test_options_of_other_tasks_and_arguments_of_the_model_are_no_misspelt_ones(metadata):
    other = {"sb_ruler_vt": {"num_hops": 6}, "sb_mqrar": {"pairs": 8}, "num_chains": 2, "freq_cw": 9, "pairs": 4}
    model = {"max_length": 4096, "add_bos_token": True, "max_batch_tokens": 9, "training_length": 4, "seed": 1}
    assert load_task("sb_niah_single_1", {**metadata, **other, **model}).lengths == (2000, 3000)


def test_a_dataset_named_for_another_task_leaves_the_questions_alone(metadata):
    for dataset in ("hotpotqa", "deepmind/narrativeqa"):
        assert load_task("sb_ruler_qa_squad", {**metadata, "dataset": dataset}).record().corpus == "squad"


def test_a_file_in_another_layout_is_refused(metadata):
    for name, other, layout in (("squad", "hotpot", "SQuAD 2"), ("hotpot", "squad", "HotpotQA")):
        with pytest.raises(UserError, match=f"in the layout of {layout}"):
            load_task(f"sb_ruler_qa_{name}", {**metadata, name: metadata[other]})


@pytest.mark.exhaustive
def test_a_length_too_short_for_one_task_is_absent_there_and_run_by_the_others(metadata, caplog):
    sizes = load_task("sb_ruler_cwe", metadata).sizes
    needed = sizes.filler(3000, Frame()).minimum_length(range(metadata["num_samples"]))
    lengths = [needed - 1, 3000]
    results = evaluate(["sb_ruler"], {**metadata, "context_lengths": lengths}, limit=1)
    short, long = (f"score@{length:07d},none" for length in lengths)
    left_out = f"sb_ruler_cwe leaves out the context length of {needed - 1} tokens"
    assert f"{left_out}: with this tokenizer it needs at least {needed}" in caplog.text
    for name in TASKS:
        own = results["results"][name]
        assert long in own
        assert (short in own) == (name != "sb_ruler_cwe")
        record = TaskRecord.from_json(results["configs"][name]["metadata"]["sbeval"])
        expected = ([3000], [needed - 1]) if name == "sb_ruler_cwe" else (lengths, [])
        assert (record.lengths, record.dropped_lengths) == expected
    (sample,) = results["samples"]["sb_ruler_cwe"]
    assert sample["doc"]["lengths"] == [3000]


def test_the_number_of_samples_run_does_not_decide_which_lengths_are_left_out(metadata):
    task = load_task("sb_ruler_qa_squad", metadata)
    each = [task.sizes.filler(3000, Frame()).minimum_length([index]) for index in range(task.num_samples)]
    assert each[0] < max(each)
    task = load_task("sb_ruler_qa_squad", {**metadata, "context_lengths": [max(each) - 1, max(each)]})
    task.build_all_requests(limit=1, rank=0, world_size=1)
    assert ([len(instance.args) for instance in task.instances], task.lengths) == ([2], (max(each),))


def test_a_chat_template_can_leave_a_length_too_short(metadata):
    task = load_task("sb_niah_single_1", {**metadata, "context_lengths": [600, 3000]})
    assert task.lengths == (600, 3000)

    def chat(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return "\n".join(["Be kind. " * 90, *(message["content"] for message in messages)])

    task.build_all_requests(limit=1, rank=0, world_size=1, apply_chat_template=True, chat_template=chat)
    assert (task.lengths, list(task.aggregation())) == ((3000,), ["score@0003000"])


class Thinker(Reader):
    """Thinks before each answer, and is cut before that of every second sample."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        begun = [(prompt + settings["answer_prefix"], settings) for prompt, settings in (r.args for r in requests)]
        answers = super().generate_until([Instance("generate_until", {}, asked, 0) for asked in begun])
        return [Answer(a, thinking_cut=r.doc_id % 2 == 1) for a, r in zip(answers, requests, strict=True)]


def test_how_often_thinking_was_cut_is_a_metric_and_keeps_the_prompts(metadata):
    plain, thinking = (
        evaluated(lm, ["sb_niah_single_1"], {**metadata, **more}, limit=4)
        for lm, more in ((Reader(), {}), (Thinker(), {"thinking_tokens": 50}))
    )
    scores = thinking["results"]["sb_niah_single_1"]
    assert (scores["score@0003000,none"], scores["thinking_cut@0003000,none"]) == (1.0, 0.5)
    assert "thinking_cut@0003000,none" not in plain["results"]["sb_niah_single_1"]
    units = [[s["doc"]["haystack_units"] for s in run["samples"]["sb_niah_single_1"]] for run in (plain, thinking)]
    assert units[0] == units[1]


def test_a_longer_answer_takes_its_tokens_from_the_context(metadata):
    def prompt_tokens(**options: Any) -> int:
        (sample,) = evaluate(["sb_niah_single_1"], metadata, limit=1, **options)["samples"]["sb_niah_single_1"]
        return int(sample["doc"]["prompt_tokens"][0])

    assert 2000 - 128 - 60 < prompt_tokens() <= 2000 - 128
    assert 2000 - 600 - 60 < prompt_tokens(gen_kwargs="max_gen_toks=600") <= 2000 - 600


def test_default_lengths_beyond_the_model_are_left_out_and_named(metadata):
    task = load_task("sb_niah_single_1", {**metadata, "context_lengths": None, "max_length": 9000, "num_samples": 1})
    assert (task.requested_lengths, task.dropped_lengths) == ((4096, 8192), (16384, 32768, 65536, 131072))
    with pytest.raises(UserError, match="shortest default context length"):
        load_task("sb_niah_single_1", {**metadata, "context_lengths": None, "max_length": 4095})


def test_the_wording_is_read_without_importing_lm_evals_tasks():
    code = (
        "import sys; from sbeval.tasks.ruler import wording as w; w.niah_wording(); "
        "[w.task_wording(task) for task in ('vt', 'cwe', 'fwe', 'qa')]; "
        "w.qa_document(); w.qa_source('squad'); w.qa_source('hotpotqa'); "
        "print([m for m in sys.modules if m.split('.')[0] in ('lm_eval', 'nltk', 'wonderwords')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
