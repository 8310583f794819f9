import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from training_problems import tiny_recipe

from research.paper_experiments import extrapolation
from research.paper_experiments.extrapolation import LENGTH_KEYS, SCHEMES, Plan, jobs_of, recall_jobs
from sbeval.errors import UserError
from sbeval.training.command import train_command as train_main
from sbeval.training.recipe import RECIPE_FOLDER, read_mapping
from sbeval.training.text.arrays import load_arrays
from sbeval.training.train import train


def plan(out: Path, **changes) -> Plan:
    values = {
        "data": Path("data"),
        "packed": Path("packed.tar"),
        "held_out": Path("held_out.jsonl"),
        "out": out,
        "essays": None,
        "schemes": tuple(SCHEMES),
        "learning_rates": (1e-3, 3e-3, 9e-3),
        "tokens": 1_310_720,
        "search_tokens": 131_072,
        "validation_tokens": 5000,
        "seeds": 3,
        "extension_tokens": 131_072,
        "extension_rate": 1e-4,
        "stream_blocks": 2,
        "target_blocks": 3,
        "needle_samples": 4,
        "recall_pairs": (16, 128),
        "recall_steps": 10,
        "shrink": 1,
        "device": "cpu",
    }
    return Plan(**(values | changes))


def write_search(one: Plan, losses: dict[float, float]) -> None:
    for scheme in one.schemes:
        for rate, nll in losses.items():
            folder = extrapolation.checkpoint(one, extrapolation.search_name(scheme, rate))
            folder.mkdir(parents=True)
            (folder / "training_record.json").write_text(json.dumps({"validation": {"nll": nll}}))


def settings(command: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for flag, part in itertools.pairwise(command) if flag == "--set")


def test_every_job_has_a_name_of_its_own_and_needs_jobs_there_are(tmp_path):
    jobs = jobs_of(plan(tmp_path)) + recall_jobs(plan(tmp_path))
    names = [job.name for job in jobs]
    assert len(names) == len(set(names))
    assert {need for job in jobs for need in job.needs} <= set(names)


def test_every_scheme_sees_the_same_number_of_the_same_tokens_at_its_best_rate(tmp_path):
    one = plan(tmp_path)
    write_search(one, {1e-3: 2.0, 3e-3: 1.9, 9e-3: 2.1})
    chosen = {
        job.name: settings(list(job.command())) for job in jobs_of(one) if job.name in map("scheme_{}".format, SCHEMES)
    }
    assert len(chosen) == len(SCHEMES)
    for name in (
        "optimization.total_tokens",
        "optimization.batch_tokens",
        "data.seed",
        "data.validation_tokens",
        "seed",
    ):
        assert len({run[name] for run in chosen.values()}) == 1, name
    assert {run["optimization.learning_rate"] for run in chosen.values()} == {"0.003"}


def test_further_seeds_change_weights_and_order_alike_for_both_schemes(tmp_path):
    one = plan(tmp_path)
    write_search(one, {1e-3: 1.0, 3e-3: 1.9, 9e-3: 2.1})
    for seed in (1, 2):
        runs = [
            settings(list(job.command()))
            for job in jobs_of(one)
            if job.name in (f"scheme_rope_seed{seed}", f"scheme_stickbreaking_seed{seed}")
        ]
        assert [(run["seed"], run["data.seed"]) for run in runs] == [(str(seed), str(seed))] * 2


def test_the_lengths_to_be_shrunk_are_those_of_the_recipes():
    for scheme, lengths in SCHEMES.items():
        model = read_mapping(f"scheme_{scheme}")[0]["model"]
        for key in LENGTH_KEYS:
            place = model
            for part in key.split("."):
                place = place.get(part, {})
            found = place or None
            assert lengths.get(key, 1024 if key == "training_length_tokens" else None) == found, (scheme, key)


def test_every_shipped_scheme_is_in_the_experiment():
    assert {f"scheme_{scheme}" for scheme in SCHEMES} == {file.stem for file in RECIPE_FOLDER.glob("scheme_*.yaml")}


def test_lengths_run_from_a_quarter_to_the_multiple_asked_for(tmp_path):
    assert plan(tmp_path).lengths(64) == [256 * 2**power for power in range(9)]


def with_validation(tokens: int):
    recipe = tiny_recipe(steps=5)
    data = recipe.data.changed(validation_tokens=tokens)
    return recipe.changed(data=data)


def test_validation_text_is_never_trained_on_and_its_loss_is_in_the_record(tmp_path, data_folder):
    kept_out = 64 * 10 + 1
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("recall.npy", "record.json"):
        (changed / name).write_bytes((data_folder / name).read_bytes())
    (changed / "tokenizer").symlink_to(data_folder / "tokenizer")
    tokens = np.array(load_arrays(data_folder).tokens)
    tokens[-kept_out:] = 7
    np.save(changed / "tokens.npy", tokens)
    records, weights = [], []
    for name, folder in (("one", data_folder), ("two", changed)):
        checkpoint = train(with_validation(kept_out), tmp_path / name, data_folder=folder)
        records.append(json.loads((checkpoint / "training_record.json").read_text())["validation"])
        weights.append((checkpoint / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert records[0]["tokens"] == records[1]["tokens"] == 640
    assert records[0]["nll"] != records[1]["nll"]
    loss = json.loads((tmp_path / "one" / "training_log.jsonl").read_text().splitlines()[-1])["loss_nats"]
    assert records[0]["nll"] == pytest.approx(loss, rel=0.2)


def test_without_validation_text_there_is_no_validation_loss(tmp_path, data_folder):
    checkpoint = train(tiny_recipe(steps=1), tmp_path, data_folder=data_folder)
    assert json.loads((checkpoint / "training_record.json").read_text())["validation"] is None


@pytest.mark.parametrize("tokens", [64, 10**9])
def test_a_validation_part_that_does_not_fit_is_refused(tmp_path, data_folder, tokens):
    with pytest.raises(UserError, match="validation_tokens"):
        train(with_validation(tokens), tmp_path, data_folder=data_folder)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_trains_when_shrunk(tmp_path, data_folder, scheme):
    one = plan(tmp_path, shrink=16, data=data_folder, validation_tokens=0, tokens=4096)
    command = extrapolation.training(one, scheme, f"tiny_{scheme}", 1e-3, 4096, 0)
    arguments = [*command[command.index("train") + 1 :], "--set", "model.vocab_size=300"]
    if "4x" in scheme:
        arguments += ["--set", "data.recall_share=0.0"]
    train_main(arguments)
    config = json.loads((tmp_path / "runs" / f"tiny_{scheme}" / f"tiny_{scheme}" / "config.json").read_text())
    assert config["training_length_tokens"] == (256 if "4x" in scheme else 64)
