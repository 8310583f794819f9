"""Runs `sb` through lm-eval and writes results, samples and each process's tokens: alone, or in one of several."""

import json
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import sbeval.tasks
from sbeval.model_adapters.lm import StickBreakingLM


def main(checkpoint: str, tasks_folder: str, data_path: str, output: str) -> None:
    lm = StickBreakingLM(checkpoint, device="cpu", dtype="float32")
    metadata = {
        "pretrained": checkpoint,
        "data_path": data_path,
        "context_lengths": [32, 64],
        "ignore_share": 0.0,
        "num_samples": 8,
    }
    manager = TaskManager(
        include_path=[*map(str, sbeval.tasks.__path__), tasks_folder], include_defaults=False, metadata=metadata
    )
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=["sb_wikitext_stream", "sb_flipflop", "sb_span", "small_choice", "small_rolling", "small_generation"],
        task_manager=manager,
        bootstrap_iters=0,
    )
    Path(f"{output}.rank{lm.rank}").write_text(str(lm.session.meter.tokens))
    if results is not None:
        kept = {"results": results["results"], "samples": results["samples"]}
        Path(output).write_text(json.dumps(kept, default=str))
