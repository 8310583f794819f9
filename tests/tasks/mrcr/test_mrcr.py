"""MRCR: conversations of the hub's layout are read, counted by length, kept as turns, and scored as its authors do."""

import difflib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import evaluated, load_task, prompts

from sbeval.errors import UserError
from sbeval.evaluation import run_tasks
from sbeval.reports import load_results
from sbeval.reports.build import assemble
from sbeval.results.records import TaskRecord
from sbeval.tasks.ruler import texts

NAME = "sb_mrcr_2_needles"
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
TOPICS = ["lamps", "rivers", "bridges", "maps", "clocks", "gardens"]
FORMS = ["poem", "letter", "riddle", "speech"]


def conversation(rng: random.Random, needles: int, turns: int) -> dict[str, Any]:
    """A row in the layout of openai/mrcr, with text of its own."""
    topic, form = rng.choice(TOPICS), rng.choice(FORMS)
    others = [(other, kind) for other in TOPICS for kind in FORMS if (other, kind) != (topic, form)]
    asked = [rng.choice(others) for _ in range(turns - needles)]
    for _ in range(needles):
        asked.insert(rng.randint(0, len(asked)), (topic, form))
    messages = []
    replies = []
    for about, kind in asked:
        reply = f"A {kind}, line by line:\n" + " ".join(rng.choices([*TOPICS, "by", "night", "old", "slow"], k=40))
        messages += [{"role": "user", "content": f"write a {kind} about {about}"}]
        messages += [{"role": "assistant", "content": reply}]
        if (about, kind) == (topic, form):
            replies.append(reply)
    place = rng.randrange(needles)
    code = "".join(rng.choices("abcdefghijkXYZ123", k=10))
    question = f"Prepend {code} to the {ORDINALS[place]} {form} about {topic}. Do not include any other text."
    messages.append({"role": "user", "content": question})
    return {
        "prompt": json.dumps(messages),
        "answer": code + replies[place],
        "random_string_to_prepend": code,
        "n_needles": needles,
        "desired_msg_index": next(i for i, message in enumerate(messages) if message["content"] == replies[place]),
        "total_messages": len(messages),
        "n_chars": sum(len(message["content"]) for message in messages),
    }


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [conversation(rng, needles, turns) for turns in (9, 16, 32, 44) for _ in range(6) for needles in (2, 4, 8)]


@pytest.fixture(scope="module")
def hub(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one parquet file for each number of needles, as the hub has them."""
    place = tmp_path_factory.mktemp("mrcr")
    for needles in (2, 4, 8):
        table = datasets.Dataset.from_list([row for row in rows if row["n_needles"] == needles])
        (place / f"{needles}needle").mkdir()
        table.to_parquet(place / f"{needles}needle" / f"{needles}needle_0.parquet")
    return place


LENGTHS = [4000, 6500, 9000]


@pytest.fixture
def metadata(folder: Path, hub: Path, corpora: dict[str, Any]) -> dict[str, Any]:
    tokenizer = str(folder / "byte_level_bpe")
    return {"mrcr": str(hub), "context_lengths": LENGTHS, "tokenizer": tokenizer}


def answered(dialogue: str) -> str:
    """Reads the right answer from a prompt without a chat template."""
    code, place, form, topic = re.findall(r"Prepend (\w+) to the (\w+) (\w+) about (\w+)\.", dialogue)[-1]
    replies = re.findall(rf"User: write a {form} about {topic}\n\nAssistant: (.+?)(?=\n\nUser)", dialogue, re.DOTALL)
    return code + replies[ORDINALS.index(place)]


class Solver(PartialModel):
    """Answers what `change` makes of the right answer."""

    def __init__(self, change: Callable[[str], str] = lambda answer: answer) -> None:
        super().__init__()
        self.change = change

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [f"\n{self.change(answered(request.args[0]))}\n" for request in requests]


def needed(task: Any, rows: list[dict[str, Any]], needles: int = 2) -> list[int]:
    """The length that each conversation needs, counted from its dialogue."""
    return [counted(task, json.loads(row["prompt"])) for row in rows if row["n_needles"] == needles]


def test_each_conversation_counts_at_the_shortest_length_it_fits(
    metadata: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    for needles in (2, 4, 8):
        name = f"sb_mrcr_{needles}_needles"
        results = evaluated(Solver(), [name], metadata)
        each = needed(load_task(name, metadata), rows, needles)
        record = TaskRecord.from_json(results["configs"][name]["metadata"]["sbeval"])
        in_bin = {
            length: sum(before < tokens <= length for tokens in each)
            for before, length in zip([0, *LENGTHS], LENGTHS, strict=False)
        }
        over = sum(tokens > LENGTHS[-1] for tokens in each)
        assert all(in_bin.values())
        assert over > 0
        assert record.fitting_samples == {str(length): count for length, count in in_bin.items()}
        assert record.left_out_samples == {"4000": 0, "6500": 0, "9000": over}
        assert record.samples_sha256 is not None
        assert len(set(record.samples_sha256.values())) == 3
        assert (record.family, record.protocol) == ("mrcr", f"mrcr_{needles}_needles")
        for sample in results["samples"][name]:
            (length,), (tokens,) = sample["doc"]["lengths"], sample["doc"]["prompt_tokens"]
            assert tokens + 2048 == each[sample["doc"]["index"]]
            assert length == min(bound for bound in LENGTHS if bound >= tokens + 2048)
        for length in LENGTHS:
            assert results["results"][name][f"score@{length:07d},none"] == 1.0


def test_the_score_is_the_ratio_behind_the_required_beginning(metadata: dict[str, Any]) -> None:
    def changed(answer: str) -> str:
        kind = sum(map(ord, answer)) % 3
        return (answer[1:], answer[:-30], answer.replace("night", "noon"))[kind]

    results = evaluated(Solver(changed), [NAME], metadata)
    by_length: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for sample in results["samples"][NAME]:
        right, answer = sample["doc"]["references"][0], sample["filtered_resps"][0]
        code = re.findall(r"Prepend (\w+) to", sample["arguments"][0][0])[-1]
        ratio = difflib.SequenceMatcher(None, answer[len(code) :], right[len(code) :]).ratio()
        by_length[sample["doc"]["lengths"][0]].append(ratio if answer.startswith(code) else 0.0)
    for length, scores in by_length.items():
        assert results["results"][NAME][f"score@{length:07d},none"] == pytest.approx(sum(scores) / len(scores))
    every = [score for scores in by_length.values() for score in scores]
    assert 0.0 in every
    assert any(0.5 < score < 1 for score in every)


def test_messages_stay_turns_with_a_chat_template(metadata: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    def template(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert add_generation_prompt
        return "".join(f"<{each['role']}>{each['content']}</{each['role']}>" for each in messages) + "<assistant>"

    task = load_task(NAME, metadata)
    chat = {"apply_chat_template": True, "chat_template": template, "system_instruction": "Be exact."}
    made = prompts(task, **chat)
    listed = [json.loads(row["prompt"]) for row in rows if row["n_needles"] == 2]
    for prompt, document in zip(made, task.eval_docs, strict=True):
        assert prompt == template([{"role": "system", "content": "Be exact."}, *listed[document["index"]]])
        assert document["prompt_tokens"] == [len(task.counter.tokenizer(prompt)["input_ids"])]
    assert [len(prompt) for prompt in made] != [len(prompt) for prompt in prompts(load_task(NAME, metadata))]


def test_what_is_too_long_is_left_out_cut_or_refused(metadata: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"conversations need more than 9000 tokens: set too_long to leave_out"):
        load_task(NAME, {**metadata, "too_long": "refuse"})
    with pytest.raises(UserError, match="No conversation of sb_mrcr_2_needles fits 2100 tokens; the shortest needs"):
        load_task(NAME, {**metadata, "context_lengths": [2100]})
    task = load_task(NAME, {**metadata, "too_long": "truncate", "context_lengths": LENGTHS[:2]})
    made = prompts(task)
    assert len(made) == 24
    over = sum(tokens > LENGTHS[1] for tokens in needed(task, rows))
    assert task.task_record.cut_samples == {"4000": 0, "6500": over}
    listed = [json.loads(row["prompt"]) for row in rows if row["n_needles"] == 2]
    for prompt, document in zip(made, task.eval_docs, strict=True):
        messages = listed[document["index"]]
        assert document["prompt_tokens"][0] + 2048 <= document["lengths"][0]
        if not document["cut_tokens"][0]:
            assert document["messages"] == len(messages)
            continue
        parts = re.split(r"\n\n(?=User: |Assistant:)", prompt)
        kept = [part.partition(": ")[2] for part in parts[:-1]]
        assert kept[0] == messages[0]["content"]
        assert kept[-1] == messages[-1]["content"]
        assert len(kept) == document["messages"] < len(messages)
        turns = [tuple(m["content"] for m in messages[i : i + 2]) for i in range(0, len(messages) - 1, 2)]
        of_prompt = list(zip(kept[:-1:2], kept[1::2], strict=True))
        form, topic = re.findall(r"Prepend \w+ to the \w+ (\w+) about (\w+)\.", prompt)[-1]
        others = [turn for turn in turns[1:] if turn[0] != f"write a {form} about {topic}"]
        others_kept = [turn for turn in of_prompt[1:] if turn in others]
        first, last = (len(others_kept) + 1) // 2, len(others_kept) // 2
        assert others_kept == [*others[:first], *others[len(others) - last :]]  # the middle was removed
        assert of_prompt == [turn for turn in turns if turn not in others or turn in others_kept]
        assert answered(prompt) == document["references"][0]


def counted(task: Any, messages: list[dict[str, str]]) -> int:
    who = {"user": "User", "assistant": "Assistant"}
    text = "".join(f"{who[m['role']]}: {m['content']}\n\n" for m in messages) + "Assistant:"
    return len(task.counter.tokenizer(text)["input_ids"]) + int(task.generated_tokens)


def test_turns_with_the_queried_request_are_never_removed(
    metadata: dict[str, Any], rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    opening = {"role": "user", "content": "These are examples of requests and replies: none."}
    path = tmp_path / "opened.jsonl"
    chosen = [row for row in rows if row["n_needles"] == 8]
    opened = [{**row, "prompt": json.dumps([opening, *json.loads(row["prompt"])])} for row in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in opened))
    name = "sb_mrcr_8_needles"
    task = load_task(name, {**metadata, "mrcr": str(path)})
    least = []
    for messages in (json.loads(row["prompt"]) for row in chosen):
        form, topic = re.findall(r"(\w+) about (\w+)\.", messages[-1]["content"])[-1]
        request = f"write a {form} about {topic}"
        turns = [messages[i : i + 2] for i in range(0, len(messages) - 1, 2)]
        needles = [message for turn in turns if turn[0]["content"] == request for message in turn]
        assert len(needles) == 16
        least.append(counted(task, [opening, *needles, messages[-1]]))
    length = sorted(least)[len(least) // 2]
    options = {**metadata, "mrcr": str(path), "context_lengths": [length], "too_long": "truncate"}
    results = evaluated(Solver(), [name], options)
    record = TaskRecord.from_json(results["configs"][name]["metadata"]["sbeval"])
    fitting = {index for index, tokens in enumerate(least) if tokens <= length}
    assert {sample["doc"]["index"] for sample in results["samples"][name]} == fitting
    assert record.left_out_samples == {str(length): len(least) - len(fitting)}
    assert 0 < len(fitting) < len(least)
    assert results["results"][name][f"score@{length:07d},none"] == 1.0
    # without the right answer among its replies, a conversation loses no turn
    path.write_text("".join(json.dumps({**row, "answer": row["answer"] + "s"}) + "\n" for row in opened))
    with pytest.raises(UserError, match=f"No conversation of {name} fits {length} tokens"):
        load_task(name, options)


def test_only_considered_conversations_count_as_left_out(metadata: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    def left_out(options: dict[str, Any], **arguments: Any) -> Any:
        task = load_task(NAME, {**metadata, "context_lengths": LENGTHS[:2], **options})
        prompts(task, **arguments)
        return task.task_record.left_out_samples

    over = sum(tokens > LENGTHS[1] for tokens in needed(load_task(NAME, metadata), rows))
    assert over > 2
    assert left_out({}) == {"4000": 0, "6500": over}
    assert left_out({"num_samples": 2}) == {"4000": 0, "6500": 2}
    assert left_out({}, limit=4) == {"4000": 0, "6500": 2}
    assert left_out({}, limit=1) == {"4000": 1}
    assert left_out({}, samples=[0, 1]) == {"4000": 0, "6500": 0}


def test_the_limit_takes_lengths_in_turn_and_ranks_share(metadata: dict[str, Any]) -> None:
    task = load_task(NAME, metadata)
    prompts(task, limit=6)
    assert sorted(doc["lengths"][0] for doc in list(task.eval_docs)[:6]) == sorted(LENGTHS * 2)
    assert task.task_record.fitting_samples == {str(length): 2 for length in LENGTHS}
    whole = set(prompts(load_task(NAME, metadata)))
    ranks = []
    for rank in range(2):
        task.build_all_requests(rank=rank, world_size=2)
        ranks.append({instance.args[0] for instance in task.instances})
    assert ranks[0] | ranks[1] == whole
    assert not ranks[0] & ranks[1]
    with pytest.raises(UserError, match="some rank has no conversation for 4000 tokens"):
        task.build_all_requests(rank=0, world_size=12)
    few = load_task(NAME, {**metadata, "num_samples": 2})
    assert few.num_samples == 6


def test_options_that_mrcr_does_not_have_are_refused(metadata: dict[str, Any]) -> None:
    for option, value in (("answer_prefix", False), ("scripts", "nvidia")):
        with pytest.raises(UserError, match=f"{NAME} has no option {option}, which is {value!r}"):
            load_task(NAME, {**metadata, option: value})


def test_files_of_another_layout_are_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    row = {"prompt": "no list", "answer": "ab", "random_string_to_prepend": "a", "n_needles": 2}
    for content, message in (
        ({"text": "a"}, "Expected the columns prompt, answer"),
        ({**row, "n_needles": 3}, "holds no conversation with 2 needles"),
        (row, "as JSON lists of messages that end with the user's, found"),
        ({**row, "prompt": json.dumps([{"role": "assistant", "content": "a"}])}, "end with the user's"),
    ):
        path = tmp_path / f"{len(message)}.jsonl"
        path.write_text(json.dumps(content) + "\n")
        with pytest.raises(UserError, match=message):
            load_task(NAME, {**metadata, "mrcr": str(path)})


def test_the_hub_s_data_set_is_read_with_its_name(
    metadata: dict[str, Any], hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(name: str, config: str | None = None, **options: Any) -> Any:
        asked.append(name)
        return real(str(hub))

    real = datasets.load_dataset
    monkeypatch.setattr(texts, "on_hub_or_cached", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    task = load_task("sb_mrcr_4_needles", {**metadata, "mrcr": None})
    assert asked == ["openai/mrcr"]
    assert (task.task_record.corpus, task.task_record.corpus_detail) == ("mrcr", "openai/mrcr")


def test_a_page_shows_scores_by_needles_and_joins_no_lengths(metadata: dict[str, Any], tmp_path: Path) -> None:
    names = [f"sb_mrcr_{needles}_needles" for needles in (2, 4, 8)]
    run_tasks(Solver(), names, output=str(tmp_path / "right"), metadata={**metadata, "label": "right"})
    half = Solver(lambda answer: answer[: len(answer) // 2])
    run_tasks(half, names, output=str(tmp_path / "half"), metadata={**metadata, "label": "half"})
    results = load_results([tmp_path])
    report = assemble(results, baseline=None, publish=lambda spec, stem: (stem, ()), folder=tmp_path)
    (section,) = [section for section in report.sections if section.identifier == "mrcr"]
    (figure,) = section.figures
    plots = figure.variants["score"]["concat"]
    assert [plot["title"]["text"] for plot in plots] == ["2 needles", "4 needles", "8 needles"]
    assert "right at 9,000: 100% with 2 needles, 100% with 4 needles, 100% with 8 needles" in figure.caption.finding
    assert "Left out, since they do not fit" in figure.caption.explanation
    assert "Lines are not joined between lengths" in figure.caption.explanation
    (table,) = section.tables
    scores = {row.cells[0].plain: row.cells[1].text for row in table.rows}
    assert scores["right, 2 needles"] == "100.0%"
    assert 40 < float(scores["half, 8 needles"].rstrip("%")) < 90
    assert [section.identifier for section in report.sections].count("fitting") == 1
