"""The paper's suite names tasks that exist, and columns that its groups measure."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from partial_model import PartialModel

import sbeval.tasks
from sbeval.models import preset
from sbeval.paper import measured_columns, published_values
from sbeval.sweep.suites import suite_runs

# the folders of lm-eval that the suite draws on: indexing all of them takes many seconds
FOLDERS = (
    *("arc", "hellaswag", "openbookqa", "piqa", "race", "sciq", "winogrande", "mmlu/default", "gsm8k", "minerva_math"),
    *("benchmarks", "babilong", "longbench", "longbench2", "graphwalks", "infinitebench"),
)


@pytest.fixture(scope="module")
def index() -> dict[str, Any]:
    theirs = Path(next(iter(lm_eval.tasks.__path__)))
    ours = Path(next(iter(sbeval.tasks.__path__)))
    manager = TaskManager(include_path=[ours, *(theirs / folder for folder in FOLDERS)], include_defaults=False)
    return dict(manager.task_index)


def members(index: dict[str, Any], name: str) -> Iterator[str]:
    """Names of every task and group below a group."""
    listed = index[name].cfg.get("task") if index[name].cfg else None
    for item in listed if isinstance(listed, list) else []:
        member = item if isinstance(item, str) else item.get("group") or item["task"]
        yield member
        if member in index:
            yield from members(index, member)


def groups(index: dict[str, Any]) -> list[str]:
    return [name for name in index if name.startswith("sb_paper") or name == "sb_long_context"]


def test_every_member_of_every_group_exists(index: dict[str, Any]) -> None:
    assert len(groups(index)) >= 10
    for group in groups(index):
        assert not [member for member in members(index, group) if member not in index]


def test_every_task_of_the_long_context_suite_exists(index: dict[str, Any]) -> None:
    runs = suite_runs("long-context", None)
    assert {"babilong-4k", "longbench", "longbench2", "graphwalks-1m", "infinitebench"} <= {run.name for run in runs}
    for run in runs:
        for task in run.tasks:
            assert task in index
            assert not [member for member in members(index, task) if member not in index]


def test_no_group_names_a_task_twice(index: dict[str, Any]) -> None:
    for group in groups(index):
        named = list(members(index, group))
        assert len(named) == len(set(named))


def test_columns_are_measured_by_the_tables_group(index: dict[str, Any]) -> None:
    suite = {2: "sb_paper_nlp", 3: "sb_paper_mmlu", 4: "sb_paper_gsm8k", 5: "sb_paper_appendix"}
    for column in measured_columns():
        assert set(column.task.split("+")) <= set(members(index, suite[column.table]))


def test_every_table_is_whole_and_its_means_are_those_of_its_cells() -> None:
    rows: dict[tuple[int, str], dict[str, float]] = {}
    for value in published_values():
        assert value.source == f"Table {value.table}, arXiv 2410.17980"
        row = rows.setdefault((value.table, value.row), {})
        assert value.column not in row
        row[value.column] = value.value
    assert Counter(table for table, _ in rows) == {1: 3, 2: 6, 3: 7, 4: 2, 5: 8}
    columns = measured_columns()
    for (table, _), row in rows.items():
        measured = {column.column for column in columns if column.table == table}
        if table > 1:
            assert row.keys() - {"Avg."} == measured
        if "Avg." in row:
            parts = [value for name, value in row.items() if name not in ("Avg.", "Wikitext")]
            assert row["Avg."] == pytest.approx(sum(parts) / len(parts), abs=0.0501)


def test_table_1_is_the_presets() -> None:
    cells = {(value.row, value.column): value.value for value in published_values() if value.table == 1}
    for row in ("350M", "1B", "3B"):
        config = preset(row.lower())
        assert cells[row, "layers"] == config.num_hidden_layers
        assert cells[row, "hidden"] == config.hidden_size
        assert cells[row, "intermediate"] == config.intermediate_size
        assert cells[row, "heads"] == config.num_attention_heads
        assert cells[row, "training length"] == config.training_length_tokens


NOISE = "The grass is green. " * 40
PAIRS = json.dumps({f"key{i}": f"value{i}" for i in range(20)})
GRAPH = "Edges:\na1 -> b2\nb2 -> c3\na1 -> d4\nOperation: Find the children of a1.\nEnd with Final Answer: [...]"
GRAPH_ROW = {"prompt": GRAPH, "answer_nodes": ["b2", "d4"], "prompt_chars": len(GRAPH), "problem_type": "parents"}
CHOICE_ROW = {
    **{"context": NOISE, "question": "Which colour?", "choices": ["red", "blue", "green", "grey"], "answer": 2},
    **{"domain": "Long In-context Learning", "sub_domain": "x", "difficulty": "easy", "length": "short", "_id": "1"},
}


def needle_rows(asked: str, context: str, answer: str) -> list[dict[str, Any]]:
    return [{"id": i, "context": context, "input": asked, "answer": [answer], "options": []} for i in range(2)]


ROWS = {
    **dict.fromkeys(("graphwalks_128k", "graphwalks_1M"), ("train", [GRAPH_ROW | {"date_added": "2025"}] * 2)),
    "infinitebench_passkey": ("passkey", needle_rows("What is it? It is", f"{NOISE}The pass key is 71432.", "71432")),
    "infinitebench_number_string": (
        "number_string",
        needle_rows("What is it? It is", f"{NOISE}The sequence of digits is 7143299855.", "7143299855"),
    ),
    "infinitebench_kv_retrieval": ("kv_retrieval", needle_rows('Key: "key7"', f"JSON data:\n{PAIRS}", "value7")),
    "longbench2_many_shot": ("train", [CHOICE_ROW] * 2),
}


class Reads(PartialModel):
    """Reads the answer in the prompt."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self.read(request.args[0]) for request in requests]

    def read(self, prompt: str) -> str:
        if "children of a1" in prompt:
            return f"So:\nFinal Answer: [{', '.join(re.findall(r'a1 -> (..)', prompt))}]"
        if "Key: " in prompt:
            return str(json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])[prompt.rsplit('"', 2)[1]])
        return f" {re.findall('[0-9]+', prompt)[-1]}."

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [(0.0 if request.args[1].strip() == "C" else -9.0, False) for request in requests]


@pytest.mark.parametrize("name", ROWS)
def test_a_right_answer_scores_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split, rows = ROWS[name]
    table = datasets.Dataset.from_list(rows)
    splits = datasets.DatasetDict({split: table})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **given: table if given.get("split") else splits)
    folder = Path(next(iter(lm_eval.tasks.__path__))) / name.partition("_")[0]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results: Any = simple_evaluate(Reads(), tasks=[name], task_manager=manager, bootstrap_iters=0)
    scores = {key: value for key, value in results["results"][name].items() if key.endswith(",none")}
    own = {key: value for key, value in scores.items() if "stderr" not in key}
    assert own
    assert set(own.values()) == {1.0}
