"""Recall probes ask for the right tokens at the right places, and score answers as defined."""

import math
import re
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS, evaluated, load_task, prompts

from sbeval.errors import UserError
from sbeval.results.records import TaskRecord
from sbeval.scoring.requests import TargetLogprobs, TargetSequence, resolve_sequence
from sbeval.tasks.recall.options import FlipFlopOptions
from tests.marks import exhaustive


def sequences(task: Any, limit: int = 2) -> list[TargetSequence]:
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    resolved = [resolve_sequence(instance.args[0]) for instance in task.instances]
    assert [instance.args[1] for instance in task.instances] == [len(sequence.inputs_L) for sequence in resolved]
    return resolved


def decoded(task: Any, tokens: Any) -> str:
    text: str = task.counter.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    return text.replace(" \u2424 ", "\n").replace("\u2424", "\n")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_back", [1, 3])
def test_text_mqrar_asks_for_the_number_n_assignments_ago(folder, kind, n_back):
    options = {"tokenizer": str(folder / kind), "context_lengths": [500, 900], "pairs": [2, 5], "n_back": n_back}
    task = load_task("sb_mqrar_text", options)
    found = sequences(task)
    for number, (sequence, replaced) in enumerate(zip(found[0::2], found[1::2], strict=True)):
        assert len(sequence.inputs_L) == [500, 500, 900, 900][number % 4]
        counts = task.eval_docs[number // 4]["answer_tokens"][number % 4][0]
        for answer, name, before in answers_of_text(task, sequence, counts):
            assert answer == re.findall(rf"(?:^|\n) ?{name} = (\d{{4}})\n", before)[-n_back]
        asked = min(len(re.findall(r"# ?\d{4}", decoded(task, one.inputs_L))) for one in (sequence, replaced))
        assert len(counts) in (asked, asked + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_text_mqrar_asks_the_same_with_other_numbers_assigned(folder, kind):
    task = load_task("sb_mqrar_text", {"tokenizer": str(folder / kind), "context_lengths": [700], "pairs": [4]})
    found = sequences(task)
    for number, (shown, replaced) in enumerate(zip(found[0::2], found[1::2], strict=True)):
        counts = task.eval_docs[number]["answer_tokens"][0]
        pairs = [answers_of_text(task, one, own) for one, own in zip((shown, replaced), counts, strict=True)]
        assert len(pairs[0]) >= 3
        for (answer, name, before), (same_answer, same_name, other_before) in zip(*pairs, strict=True):
            assert (answer, name) == (same_answer, same_name)
            own, other = (re.findall(r"(?:^|\n) ?([a-z]+) = (\d{4})\n", text) for text in (before, other_before))
            assert [one for one, _ in own] == [one for one, _ in other]
            assert all(value != other_value for (_, value), (_, other_value) in zip(own, other, strict=True))


def answers_of_text(task: Any, sequence: TargetSequence, counts: list[int]) -> list[tuple[str, str, str]]:
    """Returns each answer, the name it is asked for, and the text before it."""
    assert sum(counts) == len(sequence.targets_T)
    found = []
    for start, count in zip(np.cumsum(counts) - counts, counts, strict=True):
        answer = decoded(task, sequence.targets_T[start : start + count]).strip()
        before = decoded(task, sequence.inputs_L[: sequence.positions_T[start] + 1])
        match = re.search(r"print ?\( ?([a-z]+) ?\) ?#$", before.rstrip().replace("  ", " "))
        assert match is not None, before[-40:]
        found.append((answer, match[1], before))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_flip_flop_reads_the_bit_written_last(folder, kind):
    task = load_task("sb_flipflop", {"tokenizer": str(folder / kind), "context_lengths": [400], "ignore_share": 0.5})
    for sequence in sequences(task):
        assert len(sequence.inputs_L) == 400
        assert len(sequence.targets_T) >= 10
        for position, target in zip(sequence.positions_T, sequence.targets_T, strict=True):
            before = decoded(task, sequence.inputs_L[: position + 1])
            assert before.rstrip().endswith("r")
            assert decoded(task, np.array([target])).strip() == re.findall(r"w ([01])", before)[-1]


def test_token_mqrar_uses_the_generator(folder):
    task = load_task("sb_mqrar", {"pairs": [8, 16], "context_lengths": [128], "vocabulary": 100, "num_samples": 3})
    found = sequences(task, limit=3)
    assert len(found) == 12
    assert [len(sequence.targets_T) for sequence in found[:4]] == [64 - 8, 64 - 8, 64 - 16, 64 - 16]
    assert "answer_nll_8_pairs@0000128" in task.aggregation()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("sb_niah_single_1", "sb_niah_multikey_3", "sb_json_kv")),
        ("sb_niah_multikey_2", {"scripts": "nvidia", "context_lengths": [4200], "num_samples": 12}),
    ],
)
def test_forced_needles_score_the_answer_behind_the_generated_tasks_own_prompts(folder, name, options, kind):
    options = {"tokenizer": str(folder / kind), "context_lengths": [2000, 3000], "num_samples": 2, **options}
    texts = prompts(load_task(name, options))
    task = load_task(f"{name}_forced", options)
    found = sequences(task, limit=options["num_samples"])
    encode, lengths = task.counter.tokenizer, len(options["context_lengths"])
    for number, text in enumerate(texts):
        (value,) = task.eval_docs[number // lengths]["references"]
        shown, replaced = found[2 * number : 2 * number + 2]
        assert [*shown.inputs_L.tolist(), int(shown.targets_T[-1])] == encode(f"{text} {value}")["input_ids"]
        for sequence in (shown, replaced):
            length = len(sequence.inputs_L)
            assert sequence.positions_T.tolist() == list(range(length - len(sequence.targets_T), length))
            assert decoded(task, sequence.targets_T).strip() == value
        assert decoded(task, shown.inputs_L).count(value[:-1]) >= 1
        assert task.generator.value_in_needle(value) in text
        without_spaces = decoded(task, replaced.inputs_L).replace(" ", "")
        assert task.generator.value_in_needle(value).replace(" ", "") not in without_spaces
        assert shown.targets_T.tolist() == replaced.targets_T.tolist()
    assert "scripts" not in options or texts != prompts(load_task(name, options | {"scripts": None}))


class Half(PartialModel):
    """Gives every target one nat, two where values were replaced, and gets every second answer right."""

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        results = []
        for number, request in enumerate(requests):
            count = len(resolve_sequence(request.args[0]).targets_T)
            nats = 1.0 + number % 2
            results.append(TargetLogprobs(np.full(count, -nats, np.float32), np.arange(count) % 2 == 0))
        return results


def test_metrics_inside_lm_eval(folder):
    options = {"tokenizer": str(folder / "character"), "context_lengths": [1200], "pairs": [4]}
    tasks = ["sb_mqrar_text", "sb_mqrar", "sb_niah_single_1_forced"]
    results = evaluated(Half(), tasks, options, limit=2)
    text, tokens, needle = (results["results"][task] for task in tasks)
    assert text["answer_nll_4_pairs@0001200,none"] == 4.0  # four digits
    assert text["exact_match_4_pairs@0001200,none"] == 0.0
    assert text["chance_4_pairs@0001200,none"] == 1 / 9000
    assert text["retrieval_gain_4_pairs@0001200,none"] == 4.0
    assert text["retrieval_gain_4_pairs@0001200_stderr,none"] == 0.0
    assert tokens["retrieval_gain_4_pairs@0001200,none"] == 1.0
    assert tokens["exact_match_4_pairs@0001200,none"] == pytest.approx(0.5)
    assert tokens["chance_4_pairs@0001200,none"] == 1 / 4096
    assert needle["answer_nll@0001200,none"] == 8.0  # a space and seven digits
    assert needle["retrieval_gain@0001200,none"] == 8.0
    assert needle["chance_nll@0001200,none"] == pytest.approx(math.log(9_000_000))
    record = TaskRecord.from_json(results["configs"]["sb_mqrar"]["metadata"]["sbeval"])
    assert (record.family, record.protocol, record.lengths) == ("recall", "mqrar", [1200])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("sb_mqrar", {"pairs": 0}, "pairs of sb_mqrar to be a list of whole numbers"),
        ("sb_mqrar", {"context_lengths": [64]}, "need at least"),
        ("sb_mqrar_text", {"pairs": 100, "context_lengths": [300]}, "has no question within 300 tokens"),
        ("sb_flipflop", {"ignore_share": 1}, "ignore_share of sb_flipflop to be a number"),
        ("sb_niah_single_1_forced", {"num_needle_v": 2, "context_lengths": [2000]}, "can score only one answer"),
        ("sb_copy_passage", {"context_lengths": [64]}, "does not fit its words and their repetitions"),
        ("sb_copy_selective", {"context_lengths": [128]}, "into a context of 128 tokens"),
        ("sb_copy_phrase", {"context_lengths": [200]}, "use a longer context length or fewer words"),
        ("sb_copy_phrase", {"context_lengths": [2048], "distances": [4000]}, "does not fit its words"),
        ("sb_copy_phrase", {"context_lengths": [2048], "distances": [4]}, "does not fit its words"),
        ("sb_copy_passage", {"passage_words": 3}, "passage_words of sb_copy_passage to be"),
        ("sb_copy_selective", {"marked_words": 0}, "marked_words of sb_copy_selective to be"),
        ("sb_copy_phrase", {"sb_copy_phrase": {"distance": 4}}, "did you mean 'distances'"),
        ("sb_json_kv", {"type_haystack": "noise"}, "asks for one value in one JSON object"),
        ("sb_json_kv", {"num_needle_v": 2}, "leave type_haystack, num_needle_q and num_needle_v out"),
        ("sb_json_kv", {"num_needle_q": 2}, "asks for one value"),
        *exhaustive(("sb_json_kv", {"context_lengths": [300]}, "sb_json_kv needs at least")),
        ("sb_json_kv", {"sb_json_kv": {"depth": 3}}, "did you mean 'depths'"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(folder, task, options, message):
    with pytest.raises(UserError, match=message):
        load_task(task, {"tokenizer": str(folder / "byte_level_bpe"), **options})


def test_several_steps_back_are_asked_for_in_one_run(folder):
    options = {"tokenizer": str(folder / "byte_level_bpe"), "pairs": 2, "context_lengths": [600], "n_back": [1, 2, 4]}
    for name in ("sb_mqrar_text", "sb_mqrar"):
        task = load_task(name, options)
        keys = [f"exact_match_2_pairs{back}@0000600" for back in ("", "_2_back", "_4_back")]
        assert set(keys) <= set(task.aggregation())
        assert [condition.n_back for condition in task.all_conditions] == [1, 2, 4]
        assert len(sequences(task, limit=1)) == 6


def test_options_can_be_set_for_one_task_alone(folder):
    own = {"pairs": 3, "vocabulary": 64, "context_lengths": [128]}
    task = load_task("sb_mqrar", {"pairs": [8], "context_lengths": [512], "sb_mqrar": own})
    assert next(iter(task.aggregation())) == "exact_match_3_pairs@0000128"
    with pytest.raises(UserError, match=r"keys that sb_mqrar has, found unknown key 'pair' .*did you mean 'pairs'"):
        load_task("sb_mqrar", {"sb_mqrar": {"pair": 3}})


def test_a_model_with_too_few_token_ids_is_refused(folder):
    (folder / "config.json").write_text('{"vocab_size": 500}')
    with pytest.raises(UserError, match="8192 token ids and the model has 500"):
        load_task("sb_mqrar", {"pretrained": str(folder)})


def test_a_length_that_this_machine_cannot_write_is_refused(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 2**14)
    with pytest.raises(UserError, match="up to 524288, because building a text needs 512 bytes of memory a token and"):
        FlipFlopOptions(context_lengths=[2**20]).lengths_of("sb_flipflop", None)
