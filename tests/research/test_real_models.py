"""Texts, jobs and archives of the evaluation of released models."""

import argparse
import json
import tarfile
from pathlib import Path

import pytest
import torch

from research.real_models import archive, evaluate, page, texts
from sbeval.corpora.archives import unpack

pytestmark = pytest.mark.exhaustive


def options_of(tmp_path: Path, model_type: str) -> argparse.Namespace:
    config = {"model_type": model_type, "max_position_embeddings": 8192, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return argparse.Namespace(
        model=tmp_path, texts=tmp_path / "texts", out=tmp_path / "out", ways=(), extensions=["yarn_4"], steps=2
    )


@pytest.mark.parametrize("model_type", evaluate.GROUPS)
def test_every_group_of_a_model_has_jobs_of_different_names_once_its_texts_are_there(
    model_type: str, tmp_path: Path
) -> None:
    options = options_of(tmp_path, model_type)
    options.out.mkdir()
    for name in ("essays", "docstrings.jsonl", *(f"{text}.jsonl.gz" for text in ("modules", "packages", "wikitext"))):
        (options.texts / name).mkdir(parents=True)
    (options.texts / "essays.jsonl.gz").touch()
    (options.texts / "library.jsonl.gz").touch()
    for group in evaluate.GROUPS[model_type]:
        assert evaluate.jobs_of([group], options, "cuda"), group
    names = [job.name for job in evaluate.jobs_of(evaluate.GROUPS[model_type], options, "cuda")]
    assert len(names) == len(set(names))


def test_evaluations_whose_text_is_missing_are_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of(tmp_path, "llama")
    options.texts.mkdir()
    (options.texts / "modules.jsonl.gz").touch()
    names = [job.name for job in evaluate.jobs_of(["lengths"], options, "cuda")]
    assert names == ["modules"]
    assert f"leaves out wikitext: there is no {options.texts / 'wikitext.jsonl.gz'}" in capsys.readouterr().out


def test_an_estimate_asks_about_the_model_and_the_tasks_of_its_run(tmp_path: Path) -> None:
    evaluation = evaluate.Evaluation(
        name="run", tasks="task", metadata={"context_lengths": [512]}, arguments="rope_scaling=yarn:4", limit=3
    )
    command = evaluate.command_of(evaluation, tmp_path, tmp_path, tmp_path, "cuda")
    shell = evaluate.estimate_of(command, tmp_path, "run")[-1]
    for piece in (f"inspect {tmp_path}", "--tasks task", "--limit 3", "rope_scaling=yarn:4", "estimates/run.json"):
        assert piece in shell
    assert "pretrained=" not in shell


def test_the_library_is_cut_between_modules_into_long_documents() -> None:
    library = [(f"{number}.py", "x" * 1000) for number in range(2000)]
    documents = texts.library_documents(library)
    assert 0 < len(documents) <= texts.LIBRARY_DOCUMENTS
    assert all(len(text) >= texts.LIBRARY_BYTES and text.startswith("# ") for _, text in documents)


def test_labelled_sentences_are_of_packages_with_enough_of_them() -> None:
    body = "".join(f'def f{i}():\n    """Return the number {i} of a list of numbers."""\n' for i in range(70))
    library = [("many/a.py", body), ("few/a.py", body[:300]), ("test/a.py", body), ("alone.py", body)]
    sentences = texts.docstring_sentences(library)
    assert {label for _, label in sentences} == {"many"}
    assert len({text for text, _ in sentences}) == 70


def test_an_archive_keeps_numbers_and_cuts_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "evaluated/results/run/model"
    folder.mkdir(parents=True)
    (tmp_path / "evaluated/jobs.jsonl").write_text("{}\n")
    sample = {"arguments": {"gen_args_0": {"arg_0": "long " * 100, "arg_1": 3}}, "nll": 1.5}
    (folder / "samples_task.jsonl").write_text(json.dumps(sample) + "\n")
    archive.main([str(tmp_path / "evaluated"), str(tmp_path / "results.tar.xz")])
    with tarfile.open(tmp_path / "results.tar.xz") as packed:
        unpack(packed, tmp_path / "unpacked")
    (line,) = (tmp_path / "unpacked/results/run/model/samples_task.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert kept["nll"] == 1.5
    assert len(kept["arguments"]["gen_args_0"]["arg_0"]) == archive.SHOWN_CHARACTERS + 1
    assert (tmp_path / "unpacked/jobs.jsonl").exists()


def test_attention_by_layer_is_the_mean_over_heads_and_over_layers_with_windows(tmp_path: Path) -> None:
    heads = torch.zeros(3, 8, dtype=torch.float64)
    heads[:, 0] = torch.tensor([0, 1, 2])
    heads[:, 2] = torch.tensor([10.0, 30.0, 500.0])
    file = tmp_path / "results/spans/model/results_1.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"results": {"sb_span": {"attention_span@0002048,none": heads.tolist()}}}))
    table = page.by_layer(tmp_path, layers=(2,))
    assert table is not None
    assert "| layer 2, the whole text | 500.0 keys, 0.0%, 0.00 |" in table
    assert "| layers with windows | 20.0 keys, 0.0%, 0.00 |" in table
