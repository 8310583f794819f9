"""Counts the kinds of wrong answers in needle tasks, from the samples files of finished runs.

Prompts are built again, since a sample is decided by task, seed and index. Each folder below FOLDER is one model and
holds `--output_path` folders of runs without a grid of depths.

    python -m research.recall_studies.recall_failures FOLDER TOKENIZER ESSAYS
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

NIAH = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
VALUE = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\d{7}"
KINDS = {
    "right": "every reference found",
    "part": "some references found",
    "another's": "the first value of the answer belongs to another key of the prompt",
    "garbled": "a run of at least 60 % of a reference's characters",
    "made up": "a value that does not stand in the prompt",
    "none": "no value",
}


def kind(answer: str, references: list[str], score: float, prompt: str) -> str:
    if score == 1:
        return "right"
    if score > 0:
        return "part"
    found = re.search(VALUE, answer)
    if found and found[0] in re.findall(rf" is: ({VALUE})\.", prompt):
        return "another's"
    if any(shared(reference, answer[:200]) >= 0.6 * len(reference) for reference in references):
        return "garbled"
    return "made up" if found else "none"


def shared(reference: str, answer: str) -> int:
    """Returns the length of the longest run of a reference's characters that the answer holds."""
    ends = range(len(reference) + 1)
    return max((j - i for i in ends for j in ends if i < j and reference[i:j] in answer), default=0)


def prompts(task: str, metadata: dict[str, Any]) -> dict[tuple[int, int], str]:
    """Returns the prompt of each sample and length."""
    from lm_eval.tasks import TaskManager

    import sbeval.tasks

    folder = str(next(iter(sbeval.tasks.__path__)))
    built = TaskManager(include_path=folder, include_defaults=False, metadata=metadata).load([task])["tasks"][task]
    built.build_all_requests(limit=None, rank=0, world_size=1)
    return {
        (instance.doc["index"], instance.doc["lengths"][instance.idx]): instance.args[0] for instance in built.instances
    }


def plain_samples(model: Path, task: str) -> list[dict[str, Any]]:
    """Returns the samples of a model's newest run of a task without a grid of depths."""
    for results in sorted(model.rglob("results_*.json"), reverse=True):
        config = json.loads(results.read_text(encoding="utf-8"))["configs"].get(task)
        files = sorted(results.parent.glob(f"samples_{task}_2*.jsonl"))
        if config and files and "depths" not in config["metadata"]:
            return [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("essays")
    arguments = parser.parse_args()
    print("\n".join(f"- {name}: {meaning}" for name, meaning in KINDS.items()) + "\n")
    print("| task | model | length | " + " | ".join(KINDS) + " |\n" + "|---" * (3 + len(KINDS)) + "|")
    for task in (f"sb_niah_{name}" for name in NIAH):
        texts: dict[tuple[int, int], str] = {}
        for model in sorted(path for path in arguments.folder.iterdir() if path.is_dir()):
            rows = plain_samples(model, task)
            if rows and not texts:
                facts = {"context_lengths": rows[0]["doc"]["lengths"], "num_samples": len(rows)}
                texts = prompts(task, {**facts, "tokenizer": arguments.tokenizer, "essays": arguments.essays})
            for place, length in enumerate(rows[0]["doc"]["lengths"] if rows else []):
                counts = Counter(
                    kind(
                        row["filtered_resps"][place],
                        row["doc"]["references"],
                        row[f"score@{length:07d}"],
                        texts[row["doc"]["index"], length],
                    )
                    for row in rows
                )
                cells = " | ".join(str(counts[name] or "") for name in KINDS)
                print(f"| {task} | {model.name} | {length} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
