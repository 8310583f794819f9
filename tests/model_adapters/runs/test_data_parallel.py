"""Two processes that share requests give what one gives, on the CPU, for lm-eval's request types and our own."""

import json
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from ranks import run_ranks

import sbeval.tasks
from tests.model_adapters.small import Checkpoints, english, load_lm

COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
TASKS = {
    "small_choice": """
output_type: multiple_choice
doc_to_text: "{{text[:20]}}"
doc_to_choice: ["{{text[20:30]}}", " is better", " a"]
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "small_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "small_generation": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "e"
generation_kwargs: {until: ["."], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    data = tmp_path / "data.jsonl"
    lines = [line for line in english().splitlines() if len(line) > 30]
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[:7]))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, body in TASKS.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, data=data) + body)
    (tmp_path / "text.txt").write_text(english())
    return folder


def evaluate(rank: int, cache: Path, checkpoint: str, tasks_folder: str, data_path: str, output: str) -> None:
    """Writes results and samples, and each process's tokens."""
    datasets.config.HF_DATASETS_CACHE = cache
    lm = load_lm(checkpoint)
    metadata = {"pretrained": checkpoint, "data_path": data_path, "context_lengths": [32, 64]}
    metadata |= {"ignore_share": 0.0, "num_samples": 8}
    folders = [*map(str, sbeval.tasks.__path__), tasks_folder]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    names = ["sb_wikitext_stream", "sb_flipflop", "sb_span", *TASKS]
    results = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=0)
    Path(f"{output}.rank{rank}").write_text(str(lm.session.meter.tokens))
    if results is not None:
        kept = {"results": results["results"], "samples": results["samples"]}
        Path(output).write_text(json.dumps(kept, default=str))


def metrics(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {key}": value
        for task, values in results["results"].items()
        for key, value in values.items()
        if isinstance(value, float | int)
    }


@pytest.mark.exhaustive
def test_two_processes_share_the_work_and_give_the_results_of_one(
    checkpoint: Checkpoints, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "tokens"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    arguments = [str(checkpoint("stickbreaking")), str(tasks), str(tmp_path / "text.txt")]
    evaluate(0, tmp_path / "datasets", *arguments, str(tmp_path / "one"))
    run_ranks(evaluate, tmp_path / "datasets", *arguments, str(tmp_path / "two"), processes=2)

    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert metrics(one)
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-5)
    for request_type in ("sb_wikitext_stream nll@0000064", "sb_flipflop answer_nll@0000064", "sb_span span90@0000064"):
        assert any(key.startswith(request_type) for key in metrics(two)), sorted(metrics(two))
    for task, samples in one["samples"].items():
        by_document = {sample["doc_id"]: sample["target"] for sample in samples}
        assert {sample["doc_id"]: sample["target"] for sample in two["samples"][task]} == by_document
    alone = int((tmp_path / "one.rank0").read_text())
    assert max(int((tmp_path / f"two.rank{rank}").read_text()) for rank in (0, 1)) < 0.8 * alone
