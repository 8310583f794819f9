"""A person's own text, from a folder to a trained model: which tokens are trained on, and what is kept out."""

import itertools
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from corpus_problems import random_text, tiny_tokenizer

from sbeval.checkpoints.load import load_checkpoint
from sbeval.commands.cli import app
from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError
from sbeval.training.arrays import load_arrays
from sbeval.training.command import train_command
from sbeval.training.own_text import OwnText, lengths_to_report, tokenised_text

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL: dict[str, object] = {f"model.{name}": size for name, size in SIZES.items()}
SMALL |= {"model.training_length_tokens": 32, "precision": "float32"}
SMALL |= {"optimization.batch_tokens": 128, "optimization.total_tokens": 512}


@pytest.fixture
def texts() -> list[str]:
    return [random_text(40 + index, index) for index in range(50)]


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> str:
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def held_out(text: Path) -> Path:
    """The folder of a text's tokens, some documents kept out."""
    return tokenised_text(OwnText(source=str(text)), tiny_tokenizer(), holding_out=True)


def small(*options: str, **changes: object) -> list[str]:
    settings = {**SMALL, **{name.replace("__", "."): value for name, value in changes.items()}}
    return [*options, *itertools.chain(*(("--set", f"{key}={value}") for key, value in settings.items()))]


def write_text(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for index, text in enumerate(texts):
        (folder / f"{index:03d}.txt").write_text(text)
    return folder


def test_arrays_hold_every_document_but_each_twentieth_with_its_end(tmp_path, texts) -> None:
    tokenizer = tiny_tokenizer()
    source = OwnText(source=str(write_text(tmp_path / "own", [texts[0]] * 50)))
    folder = tokenised_text(source, tokenizer, holding_out=True)
    arrays = load_arrays(folder)
    assert arrays.tokens.tolist() == [*tokenizer.encode(texts[0]), tokenizer.eos_token_id] * arrays.record["documents"]
    assert arrays.record["unique_tokens"] == len(arrays.tokens)
    held_out = [json.loads(line)["text"] for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert held_out == [texts[0]] * (50 - arrays.record["documents"])
    assert load_tokenizer(arrays.tokenizer).get_vocab() == tokenizer.get_vocab()
    assert len(load_arrays(tokenised_text(source, tokenizer, holding_out=False)).tokens) > len(arrays.tokens)


def test_a_huge_document_is_not_made_up_for_by_small_ones_and_text_without_spaces_is_cut_at_its_end(tmp_path) -> None:
    small = [random_text(30, index) for index in range(30)]
    uneven = write_text(tmp_path / "uneven", [random_text(9000, 99), *small])
    assert 10 <= load_arrays(held_out(uneven)).record["held_out"]["documents"] <= 15
    record = load_arrays(held_out(write_text(tmp_path / "line", ["a b " + "題" * 4000]))).record
    assert record["held_out"]["tokens"] < record["unique_tokens"] / 15


@pytest.mark.parametrize("words", [[2000], [300, 2000, 20], [*[3] * 19, 2000, *[400] * 20], [1000, *[10] * 30]])
def test_one_token_in_twenty_is_kept_out_however_long_documents_are(tmp_path, words) -> None:
    texts = [random_text(count, index) for index, count in enumerate(words)]
    folder = held_out(write_text(tmp_path / "own", texts))
    record, tokenizer = load_arrays(folder).record, tiny_tokenizer()
    every = sum(len(tokenizer.encode(text)) for text in texts)
    assert every / 40 < record["held_out"]["tokens"] < every / 15
    kept_out = [json.loads(line)["text"] for line in (folder / "held_out.jsonl").read_text().splitlines()]
    for end in kept_out:  # a document, or what follows a white space of it
        assert any(text == end or (text.endswith(end) and text[-len(end) - 1].isspace()) for text in texts)


def test_a_data_set_of_the_hub_is_read_and_one_that_cannot_be_reached_is_named(tmp_path, texts, monkeypatch) -> None:
    def load_dataset(path: str, config: str | None, *, split: str) -> datasets.Dataset:
        if path != "someone/poems" or config is not None or split != "validation":
            raise ConnectionError("offline")
        return datasets.Dataset.from_dict({"body": texts})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    poems = OwnText(source="someone/poems", field="body", dataset_split="validation")
    found = load_arrays(tokenised_text(poems, tiny_tokenizer(), holding_out=False)).record
    assert (found["source"], found["documents"]) == ("someone/poems", 50)
    with pytest.raises(UserError, match=r"'train' of 'someone/prose' from the Hugging Face hub.*offline"):
        tokenised_text(OwnText(source="someone/prose"), tiny_tokenizer(), holding_out=False)


def test_a_vocabulary_beyond_16_bits_is_kept_in_32(tmp_path) -> None:
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.add_tokens([f"<t{number}>" for number in range(70_000)])
    (tmp_path / "own.txt").write_text("the <t69000> fox")
    tokens = load_arrays(tokenised_text(OwnText(source=str(tmp_path / "own.txt")), tokenizer, holding_out=False)).tokens
    assert tokens.dtype == np.uint32
    assert tokens.max() > 1 << 16
    assert tokens.tolist() == [*tokenizer.encode("the <t69000> fox"), tokenizer.eos_token_id]


@pytest.mark.exhaustive
def test_a_command_trains_on_a_folder_with_any_tokenizer_and_goes_on(tmp_path, texts, tokenizer_folder, capsys) -> None:
    text = write_text(tmp_path / "own", texts)
    command = ["--text", str(text), "--tokenizer", tokenizer_folder, "--out", str(tmp_path / "run")]
    train_command(small(*command, "--max-seconds", "0"))
    assert not (tmp_path / "run" / "own").exists()
    train_command(small(*command))
    loaded = load_checkpoint(tmp_path / "run" / "own")
    assert loaded.training_length_tokens == 32
    assert 0 <= loaded.model.config.vocab_size - len(tiny_tokenizer()) < 64
    assert loaded.model.config.vocab_size % 64 == 0
    assert loaded.model.config.eos_token_id == tiny_tokenizer().eos_token_id
    record = json.loads((tmp_path / "run" / "own" / "training_record.json").read_text())
    assert (record["data"]["source"], record["tokens_seen"]) == ("own", 512)
    train_command(small(*command))
    assert "already trained" in capsys.readouterr().out
    (text / "000.txt").write_text("other words")
    with pytest.raises(UserError, match=r"it differs in inputs\.tokens\.npy, tokens_sha256"):
        train_command(small(*command))


def test_without_a_tokenizer_one_is_trained_and_without_a_length_the_run_is_one_epoch(tmp_path, texts) -> None:
    text = write_text(tmp_path / "own", texts)
    train_command(small("--text", str(text), "--out", str(tmp_path / "run"), optimization__total_tokens="null"))
    assert 0.7 < json.loads((tmp_path / "run" / "own" / "training_record.json").read_text())["epochs"] <= 1
    assert load_tokenizer(tmp_path / "run" / "own").eos_token == "<|endoftext|>"


def test_another_recipe_takes_the_text_s_vocabulary_and_no_recall_text(tmp_path, texts, tokenizer_folder) -> None:
    command = ["demo_rope", "--text", str(write_text(tmp_path / "own", texts)), "--tokenizer", tokenizer_folder]
    train_command(small(*command, "--out", str(tmp_path / "run"), optimization__warmup_steps=1))
    assert load_checkpoint(tmp_path / "run" / "demo_rope").attention == "rope"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere"], "a hub data set .*found nothing at 'nowhere'"),
        (["--text", "own.txt", "--split", "9 tokens"], "--split '9 tokens' needs --tokenizer"),
        (["--text", "own.txt", "--split", "paragraphs"], "split to be paragraph"),
        (["--text", "own.txt", "--tokenizer", "no/such/folder"], "a tokenizer at 'no/such/folder'"),
        (["--text", "own.txt", "--data", "arrays"], "--text and --data exclude each other"),
        (["demo_rope", "--report"], "--report need --text"),
        ([], "a recipe or --text"),
        (small("--text", "own.txt", "--report"), "held-out tokens for --report, found 26"),
        (["--text", "own.txt", "--set", "model.training_length_tokens=8192"], "at least one step of 16384 tokens"),
        (["demo_data"], "shipped recipes.*demo_rope"),
        (["demo_rope", "--set", "optimization.learning_rat=1"], "unknown key 'learning_rat' .*mean 'learning_rate'"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text(random_text(300, 0))
    with pytest.raises(UserError, match=message):
        train_command(arguments)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["own.txt"]


def test_a_tokenizer_without_an_end_is_named(tmp_path) -> None:
    (tmp_path / "own.txt").write_text("words")
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-text token"):
        tokenised_text(OwnText(source=str(tmp_path / "own.txt")), tokenizer, holding_out=False)
    assert not list((tmp_path / "cache" / "training").glob("*/tokens*"))


def test_lengths_to_report_reach_as_far_as_the_text_kept_out(tmp_path, texts) -> None:
    folder = held_out(write_text(tmp_path / "own", texts))
    kept_out = load_arrays(folder).record["held_out"]
    assert kept_out["documents"] == 2
    lengths = lengths_to_report(folder, 16)
    assert lengths[:3] == (4, 8, 16)
    assert lengths[-1] <= (kept_out["tokens"] + 2) // 4 < 2 * lengths[-1]


@pytest.mark.exhaustive
def test_text_becomes_a_model_and_a_page_in_one_command(tmp_path, tokenizer_folder, capfd, monkeypatch) -> None:
    text = write_text(tmp_path / "own", [random_text(60, index) for index in range(60)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["train", "--text", str(text), "--tokenizer", tokenizer_folder, "--out", str(tmp_path / "run")]
    app([*command, "--report", *small()], standalone_mode=False)
    said = capfd.readouterr().out
    page = tmp_path / "run" / "report" / "index.html"
    assert said.splitlines()[-1] == f"Next: open {page.resolve().as_uri()} in a browser"
    assert said.count(page.name) == 1
    table = (tmp_path / "run" / "report" / "results.csv").read_text()
    assert {row.split(",")[0] for row in table.splitlines()[1:]}  # rows there are
    assert "own" in table
    assert "own_text" not in table
    assert "held_out" not in table
    for results in (tmp_path / "run" / "results").rglob("results_*.json"):  # on the text kept out
        configs = json.loads(results.read_text())["configs"].values()
        assert [config["metadata"]["sbeval"]["seen_documents"] for config in configs] == [[], []]
    assert "of 3 documents are held out of training for --report (one token in 20)" in said
    assert [line for line in said.splitlines() if line.startswith("Next:")] == said.splitlines()[-1:]
