"""Evaluates a released RoPE model past its training length, in several processes on one device.

    python -m research.real_models.evaluate real/smollm2 --texts real/texts --out real/smollm2-results

Each job is one `sbeval run`, `sbeval extend` or `sbeval inspect`. A job that ended well is not run again, so the
command can be repeated. On a GPU every group of the model runs; a CPU runs `quick` alone, which reads few documents.
The groups `windows` and `layers` are for a model with windows that is trained to 32,768 tokens, such as Gemma 3.
"""

import argparse
import dataclasses
import functools
import gzip
import itertools
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from research.paper_experiments.job_queue import Job, run_queue

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
CHAT_LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768]
NEEDLE_LENGTHS = [8192, 16384, 32768]
WINDOWED_LENGTHS = [*LENGTHS, 131072]
SPAN_LENGTHS = [2048, 8192, 32768, 65536, 131072]
EXTENDED_CONTEXT_TOKENS = 32768
EXTENSIONS = {"plain": [], "yarn_4": ["--rope-scaling", "yarn:4"]}
GROUPS = {
    "llama": ["extended", "lengths", "untrained", "ruler", "needles", "recall", "many_shot", "estimates"],
    "gemma3_text": ["windows", "layers", "many_shot", "estimates"],
}
"""Groups that a GPU runs, by the type of the model."""
ESTIMATED = {
    "llama": [("lengths", "modules"), ("lengths", "packages-stream"), ("needles", "self_extend_8_1024-needles")],
    "gemma3_text": [("windows", "library"), ("windows", "needles")],
}
"""Group and name of the evaluations whose memory and time are estimated too."""
NEEDLES = "sb_niah_single_1,sb_niah_single_2"
NEEDLES_FORCED = "sb_niah_single_1_forced,sb_niah_single_2_forced"
RULER_WITHOUT_QUESTIONS = "sb_niah,sb_ruler_vt,sb_ruler_cwe,sb_ruler_fwe"
RECALL = "sb_json_kv,sb_json_kv_forced,sb_copy,sb_association_forced,sb_turns_forced,sb_niah_forced"
"""RULER's two tasks of questions need SQuAD and HotpotQA, which do not come by pip."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One results file.

    Attributes:
        name: of its folder and its job.
        tasks: separated by commas.
        metadata: settings of the tasks; `{texts}` stands for the folder of texts.
        arguments: of the model, beside its folder and dtype.
        limit: documents of each task, None for all.
        chat: whether prompts go through the model's chat template.
        seconds: estimated, so that long jobs start first.
    """

    name: str
    tasks: str
    metadata: dict[str, object]
    arguments: str = ""
    limit: int | None = None
    chat: bool = False
    seconds: float = 60.0


def untrained_extensions(training_tokens: int, longrope: Path) -> dict[str, str]:
    """Returns arguments of the model by the name of a method that needs no training."""
    three_quarters, quarter = training_tokens * 3 // 4, training_tokens // 4
    return {
        "linear_4": "rope_scaling=linear:4",
        "dynamic_4": "rope_scaling=dynamic:4",
        "yarn_4": "rope_scaling=yarn:4",
        "yarn_8": "rope_scaling=yarn:8",
        "log_length": "extrapolation=log_length",
        "dynamic_4_log_length": "rope_scaling=dynamic:4,extrapolation=log_length",
        f"sink_window_4_{training_tokens - 4}": f"extrapolation=sink_window:4:{training_tokens - 4}",
        f"dual_chunk_{three_quarters}_{quarter}": f"extrapolation=dual_chunk:{three_quarters}:{quarter}",
        "self_extend_8_1024": "extrapolation=self_extend:8:1024",
        f"self_extend_16_{training_tokens // 2}": f"extrapolation=self_extend:16:{training_tokens // 2}",
        "longrope_8_ntk": f"extrapolation=longrope:{longrope}",
    }


def write_ntk_factors(folder: Path, factor: float, out: Path) -> None:
    """Writes LongRoPE factors that rise geometrically from 1 to `factor`, as in NTK-aware scaling; none is searched."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    pairs = head_dim // 2
    factors = [round(factor ** (pair / (pairs - 1)), 4) for pair in range(pairs)]
    out.write_text(json.dumps({"factor": factor, "long_factor": factors}), encoding="utf-8")


def evaluations_of(group: str, training_tokens: int, out: Path, ways: Sequence[str]) -> list[Evaluation]:
    """Returns the evaluations of one group."""
    modules = {"data_path": "{texts}/modules.jsonl.gz", "context_lengths": LENGTHS[:-1]}
    packages = {"data_path": "{texts}/packages.jsonl.gz", "context_lengths": LENGTHS}
    wikitext = {"data_path": "{texts}/wikitext.jsonl.gz", "context_lengths": LENGTHS}
    essays = {"data_path": "{texts}/essays.jsonl.gz", "context_lengths": LENGTHS[:4]}
    recall = {"essays": "{texts}/essays", "context_lengths": CHAT_LENGTHS, "num_samples": 25}
    ruler = {"essays": "{texts}/essays", "context_lengths": CHAT_LENGTHS, "num_samples": 50}
    if group == "quick":
        few = {**modules, "context_lengths": [512, 2048, 8192, 16384]}
        return [Evaluation(name="quick-modules", tasks="sb_text_fixed_target", metadata=few, limit=4)]
    if group == "lengths":
        return [
            Evaluation(name="modules", tasks="sb_text_fixed_target", metadata=modules),
            Evaluation(name="packages", tasks="sb_text_fixed_target", metadata=packages, seconds=90),
            Evaluation(name="packages-stream", tasks="sb_text_stream,sb_text_position", metadata=packages, limit=12),
            Evaluation(name="wikitext", tasks="sb_text_stream,sb_text_position", metadata=wikitext, limit=4),
            Evaluation(name="essays", tasks="sb_text_fixed_target", metadata=essays),
        ]
    if group == "untrained":
        methods = untrained_extensions(training_tokens, out / "longrope_ntk.json")
        return [
            evaluation
            for way in ways or methods
            for evaluation in (
                Evaluation(
                    name=f"{way}-modules", tasks="sb_text_fixed_target", metadata=modules, arguments=methods[way]
                ),
                Evaluation(
                    name=f"{way}-stream",
                    tasks="sb_text_stream",
                    metadata=packages,
                    arguments=methods[way],
                    limit=6,
                ),
            )
        ]
    if group == "ruler":
        half = {**ruler, "num_samples": 25}
        return [
            Evaluation(name="ruler-chat", tasks=RULER_WITHOUT_QUESTIONS, metadata=half, chat=True, seconds=400),
            Evaluation(name="ruler-plain", tasks=RULER_WITHOUT_QUESTIONS, metadata=half, seconds=400),
            Evaluation(
                name="yarn_4-ruler-chat",
                tasks="sb_niah_single_1,sb_niah_single_2,sb_niah_multikey_1,sb_ruler_vt",
                metadata=ruler,
                arguments="rope_scaling=yarn:4",
                chat=True,
                seconds=200,
            ),
        ]
    if group == "recall":
        return [
            Evaluation(name="recall", tasks=RECALL.replace("sb_copy,", ""), metadata=recall, seconds=200),
            Evaluation(name="copy", tasks="sb_copy", metadata=recall),
            Evaluation(
                name="longppl",
                tasks="sb_text_fixed_target",
                metadata={**modules, "longppl_evaluator": "{model}", "context_lengths": LENGTHS[:6]},
            ),
            Evaluation(
                name="spans",
                tasks="sb_span",
                metadata={"context_lengths": [2048, 8192, 16384], "num_samples": 8},
            ),
        ]
    if group == "needles":
        # methods that rotate keys anew generate slowly: what they find is scored instead
        methods = untrained_extensions(training_tokens, out / "longrope_ntk.json")
        few = {**ruler, "context_lengths": NEEDLE_LENGTHS, "num_samples": 25}
        chosen = ways or [way for way in methods if way.startswith(("yarn_4", "dual", "self", "sink"))]
        return [
            Evaluation(name=f"{way}-needles", tasks=NEEDLES_FORCED, metadata=few, arguments=methods[way], seconds=90)
            for way in chosen
        ]
    if group == "many_shot":
        shots = {
            "examples_file": "{texts}/docstrings.jsonl",
            "context_lengths": [512, *CHAT_LENGTHS],
            "num_samples": 50,
        }
        return [Evaluation(name="many_shot", tasks="sb_many_shot_file", metadata=shots, seconds=80)]
    library = {"data_path": "{texts}/library.jsonl.gz", "context_lengths": WINDOWED_LENGTHS}
    if group == "windows":
        two_blocks = {**library, "blocks_per_document": 2}
        methods = untrained_extensions(training_tokens, out / "longrope_ntk.json")
        chosen = ways or [way for way in methods if way in ("yarn_4", "dynamic_4", "linear_4", "longrope_8_ntk")]
        needles = {**recall, "context_lengths": [2048, 8192, 32768, 65536, 131072]}
        return [
            Evaluation(name="library", tasks="sb_text_fixed_target", metadata=two_blocks, seconds=300),
            Evaluation(
                name="library-stream", tasks="sb_text_stream,sb_text_position", metadata=library, limit=4, seconds=100
            ),
            Evaluation(name="needles", tasks=NEEDLES, metadata=needles, seconds=200),
            *(
                Evaluation(
                    name=f"{way}-library",
                    tasks="sb_text_fixed_target",
                    metadata={**two_blocks, "context_lengths": [8192, 32768, 65536, 131072]},
                    arguments=methods[way],
                    seconds=80,
                )
                for way in chosen
            ),
        ]
    if group == "layers":
        spans = {**library, "context_lengths": SPAN_LENGTHS, "num_samples": 8}
        return [Evaluation(name="spans-library", tasks="sb_span", metadata=spans, seconds=250)]
    known = sorted({each for groups in GROUPS.values() for each in groups})
    raise SystemExit(f"There is no group {group!r}: choose quick or one of {', '.join(known)}.")


def missing_text(evaluation: Evaluation, texts: Path) -> Path | None:
    """Returns a text of an evaluation that is not in the folder of texts, None where all are."""
    names = [value for value in evaluation.metadata.values() if isinstance(value, str) and value.startswith("{texts}")]
    files = [Path(name.replace("{texts}", str(texts))) for name in names]
    return next((file for file in files if not file.exists()), None)


def command_of(evaluation: Evaluation, model: Path, texts: Path, out: Path, device: str) -> list[str]:
    """Returns the command line of an evaluation."""
    metadata = json.dumps(evaluation.metadata).replace("{texts}", str(texts)).replace("{model}", str(model))
    lengths = evaluation.metadata["context_lengths"]
    assert isinstance(lengths, list)
    dtype = "bfloat16" if device == "cuda" else "float32"
    longest = max(lengths) + 1024  # chats need room for the answer
    arguments = f"pretrained={model},dtype={dtype},max_length={longest}"
    arguments += f",{evaluation.arguments}" if evaluation.arguments else ""
    command = [sys.executable, "-m", "sbeval", "run", "--model_args", arguments, "--device", device]
    command += ["--tasks", evaluation.tasks, "--metadata", metadata, "--batch_size", "8"]
    command += ["--limit", str(evaluation.limit)] if evaluation.limit is not None else []
    command += ["--apply_chat_template"] if evaluation.chat else []
    return [*command, "--output_path", str(out / "results" / evaluation.name)]


def estimate_of(command: Sequence[str], out: Path, name: str) -> list[str]:
    """Returns a command line that writes what `sbeval inspect` expects of an evaluation, with its command's options."""
    inspected = {"--metadata", "--limit", "--model_args", "--tasks"}
    given = [word for flag, value in itertools.pairwise(command) if flag in inspected for word in (flag, value)]
    arguments = command[command.index("--model_args") + 1]
    model = arguments.partition(",")[0].removeprefix("pretrained=")
    lengths = json.loads(command[command.index("--metadata") + 1])["context_lengths"]
    given[given.index("--model_args") + 1] = ",".join(
        argument for argument in arguments.split(",") if not argument.startswith(("pretrained=", "dtype="))
    )
    line = [sys.executable, "-m", "sbeval", "inspect", model, "--json", "--measure", "--dtype", "bfloat16"]
    line += ["--lengths", ",".join(map(str, lengths)), *given]
    return ["bash", "-c", f"{shlex.join(line)} > {shlex.quote(str(out / 'estimates' / name))}.json"]


def jobs_of(groups: Sequence[str], options: argparse.Namespace, device: str) -> list[Job]:
    """Returns the jobs of the groups, extensions and evaluations of extended models included."""
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    training_tokens = int(config["max_position_embeddings"])

    def job(evaluation: Evaluation, model: Path, needs: tuple[str, ...] = (), prefix: str = "") -> Job:
        named = Evaluation(**{**vars(evaluation), "name": prefix + evaluation.name})
        return Job(
            name=named.name,
            command=lambda: command_of(named, model, options.texts, options.out, device),
            needs=needs,
            estimated_seconds=named.seconds,
        )

    def readable(evaluations: Sequence[Evaluation]) -> Iterator[Evaluation]:
        for evaluation in evaluations:
            missing = missing_text(evaluation, options.texts)
            if missing is None:
                yield evaluation
            else:
                print(f"leaves out {evaluation.name}: there is no {missing}", flush=True)

    jobs = []
    for group in groups:
        if group == "estimates":
            (options.out / "estimates").mkdir(exist_ok=True)
            estimated = ESTIMATED[config["model_type"]]
            planned = [
                evaluation
                for group_of_it in dict(estimated)
                for evaluation in evaluations_of(group_of_it, training_tokens, options.out, ())
                if (group_of_it, evaluation.name) in estimated
            ]
            for evaluation in readable(planned):
                command = command_of(evaluation, options.model, options.texts, options.out, device)
                line = estimate_of(command, options.out, evaluation.name)
                jobs.append(Job(name=f"estimate-{evaluation.name}", command=functools.partial(list, line)))
        elif group == "extended":
            jobs += _extensions(options, training_tokens, readable, job)
        else:
            planned = evaluations_of(group, training_tokens, options.out, options.ways)
            jobs += [job(evaluation, options.model) for evaluation in readable(planned)]
    return jobs


def _extensions(
    options: argparse.Namespace,
    training_tokens: int,
    readable: Callable[[Sequence[Evaluation]], Iterator[Evaluation]],
    job: Callable[..., Job],
) -> list[Job]:
    """Returns the trainings, one after another, and the evaluations of the extended models.

    Logits of a window of 32,768 tokens take most of a GPU's memory.
    """
    jobs: list[Job] = []
    before: tuple[str, ...] = ()
    for extension in options.extensions:
        name = f"extended_{extension}"
        folder = options.out / name
        extend = [sys.executable, "-m", "sbeval", "extend", str(options.model)]
        extend += ["--data", str(options.texts / "training.jsonl"), "--context", str(EXTENDED_CONTEXT_TOKENS)]
        extend += ["--out", str(folder), "--steps", str(options.steps), "--batch-tokens", "65536"]
        extend += ["--documents", "joined", "--allow-repeat", "--log-every-steps", "20", *EXTENSIONS[extension]]
        jobs.append(Job(name=name, command=functools.partial(list, extend), needs=before, urgency=10))
        before = (name,)
        needles = Evaluation(
            name="needles",
            tasks=NEEDLES,
            metadata={"essays": "{texts}/essays", "context_lengths": CHAT_LENGTHS, "num_samples": 50},
            chat=True,
            seconds=150,
        )
        for evaluation in readable([needles, *evaluations_of("lengths", training_tokens, options.out, ())]):
            urgency = 5 if evaluation.name in ("needles", "modules") else 0
            made = job(evaluation, folder / "checkpoint", (name,), f"{name}-")
            jobs.append(dataclasses.replace(made, urgency=urgency))
    return jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--texts", type=Path, required=True, help="folder that research.real_models.texts wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", nargs="*", help="default: all on a GPU, quick on a CPU")
    parser.add_argument("--ways", nargs="*", default=[], help="methods that need no training; default: all of a group")
    parser.add_argument(
        "--extensions", nargs="+", default=list(EXTENSIONS), choices=EXTENSIONS, help="of the group extended"
    )
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of an extension")
    parser.add_argument("--places", type=int, default=6, help="jobs at a time on a GPU")
    parser.add_argument("--max-seconds", type=float, help="end what still runs after this time")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    groups = options.groups or (GROUPS[config["model_type"]] if on_gpu else ["quick"])
    options.out.mkdir(parents=True, exist_ok=True)
    write_ntk_factors(options.model, 8.0, options.out / "longrope_ntk.json")
    training = options.texts / "training.jsonl"
    if "extended" in groups and not training.exists():  # `sbeval extend` reads no compressed text
        with gzip.open(options.texts / "training.jsonl.gz") as packed, training.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    failed = run_queue(
        jobs_of(groups, options, "cuda" if on_gpu else "cpu"),
        options.out,
        gpus=1 if on_gpu else 0,
        places=options.places if on_gpu else 1,
        max_seconds=options.max_seconds,
        environment={"OMP_NUM_THREADS": "2"},
    )
    if failed:
        raise SystemExit(f"not done: {', '.join(failed)} (logs in {options.out / 'logs'})")


if __name__ == "__main__":
    main()
