"""Targets scored under two conditions: pairs of a user's own, and documents riffled with others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_problems import BOS, EOS, KnownLM, random_text, run_task, tiny_tokenizer, write_folder
from lm_eval.api.instance import Instance
from ruler_problems import load_task

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetLogprobs, resolve_sequence

LENGTHS = [4, 16, 32]


def write_pairs(folder: Path, contexts: list[int], **more: Any) -> dict[str, Any]:
    """Writes pairs whose contexts have some tokens; returns metadata."""
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    rows = [{"context": random_text(n, seed=n), "target": " " + random_text(3, seed=100 + n)} for n in contexts]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {"data_path": str(folder / "mine.jsonl"), "context_lengths": LENGTHS}
    return {"tokenizer": str(folder / "tokenizer"), **options, **more}


def test_a_pair_is_scored_behind_the_last_tokens_of_its_context_and_alone(tmp_path: Path) -> None:
    model, contexts = KnownLM(), [4 + index for index in range(40)]
    found = run_task("sb_text_pairs", model, write_pairs(tmp_path, contexts))
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = tiny_tokenizer()
    expected: dict[str, dict[int, float]] = {}
    for number, row in enumerate(rows, start=1):
        context, both = (tokenizer.encode(text) for text in (row["context"], row["context"] + row["target"]))
        if len(context) >= LENGTHS[-1]:
            target = np.array(both[len(context) :])
            places = np.arange(len(target)) + 1
            expected[f"mine.jsonl:{number}"] = {
                n: KnownLM.nll(np.array([context[-1] if n else BOS, *target[:-1]]), target, places + n).sum()
                for n in (0, *LENGTHS)
            }
    assert 20 <= len(expected) < len(rows)
    assert len({(key.split(":")[-1], scored) for key, _, _, scored in model.seen}) == len(expected)
    for length in LENGTHS:
        by_key = {key: {} for key in ("nll", "nll_without")}
        for sample in found["samples"]:
            for key, sums in by_key.items():
                sums |= {name: nats for name, nats, *_ in sample[f"{key}@{length:07d}"]}
        assert by_key["nll"] == pytest.approx({name: nats[length] for name, nats in expected.items()}, rel=1e-5)
        assert by_key["nll_without"] == pytest.approx({name: nats[0] for name, nats in expected.items()}, rel=1e-5)
        values = {key: found["values"][f"{key}@{length:07d}"] for key in ("nll", "nll_without", "gain_over_without")}
        assert values["gain_over_without"] == pytest.approx(values["nll_without"] - values["nll"])
        low, high = found["values"][f"gain_over_without_ci95@{length:07d}"]
        assert low <= values["gain_over_without"] <= high


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"context": "a", "target": ""}', "'target' is empty in line 1"),
        ('{"context": "a"}', 'Line 1 of .* string in \'target\': write one {"context": "...", "target": "..."} a line'),
        ('"text"', "Line 1 of .* an object with a string in 'context'"),
        ("", "holds no pairs: write one"),
    ],
)
def test_what_is_no_pair_is_one_sentence(tmp_path: Path, line: str, message: str) -> None:
    metadata = write_pairs(tmp_path, [40])
    (tmp_path / "mine.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_task("sb_text_pairs", metadata)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"split": "paragraph"}, "no dataset, split or text_field"), ({}, "because the longest context has")],
)
def test_pairs_refuse_what_they_cannot_do(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task("sb_text_pairs", write_pairs(tmp_path, [40], context_lengths=[9999], **options))


class Riffles(KnownLM):
    """Keeps the sequences it was asked for."""

    def target_logprobs(self, requests: list[Instance]) -> list[TargetLogprobs]:
        self.sequences = [resolve_sequence(request.args[0]) for request in requests]
        # more certain, the more of the sequence the targets' own document is
        answers = [-np.unique(sequence.inputs_L).size * np.ones(len(sequence.targets_T)) for sequence in self.sequences]
        return [TargetLogprobs(answer.astype(np.float32), np.ones(len(answer), bool)) for answer in answers]


def riffled(folder: Path, **more: Any) -> tuple[Riffles, Any]:
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    texts = write_folder(folder / "texts", [60 + 3 * index for index in range(24)])
    options = {"tokenizer": str(folder / "tokenizer"), "data_path": str(texts), "context_lengths": [24, 48]}
    model = Riffles()
    return model, run_task("sb_text_riffled", model, {**options, "riffled_documents": 3, "piece_tokens": 4, **more})


def test_riffled_documents_hold_the_same_tokens_and_the_same_targets(tmp_path: Path) -> None:
    model, found = riffled(tmp_path, blocks_per_document=1)
    piece, documents, lengths = 4, 3, (24, 48)
    assert len(found["samples"]) >= 20
    for first in range(0, len(model.sequences), 6):
        of_block = model.sequences[first : first + 6]
        assert {len(sequence.inputs_L) for sequence in of_block} == set(lengths)
        assert all(np.array_equal(sequence.targets_T, of_block[0].targets_T) for sequence in of_block)
        for place, length in enumerate(lengths):
            whole, blocks, replaced = (
                np.concatenate([sequence.inputs_L[1:], sequence.targets_T[-1:]]).reshape(-1, piece)
                for sequence in of_block[place::2]
            )
            assert of_block[place].inputs_L[0] == EOS
            assert len(whole) == length // piece
            each = len(whole) // documents
            assert np.array_equal(blocks, whole.reshape(each, documents, piece).swapaxes(0, 1).reshape(-1, piece))
            others = np.arange(len(whole)) % documents < documents - 1
            assert np.array_equal(replaced[others], whole[others])
            assert np.array_equal(replaced[-1], whole[-1])
            assert not np.array_equal(replaced[~others][:-1], whole[~others][:-1])
    again, _ = riffled(tmp_path / "again", blocks_per_document=1)
    assert all(np.array_equal(a.inputs_L, b.inputs_L) for a, b in zip(model.sequences, again.sequences, strict=True))
    for condition in ("blocks", "replaced"):
        values = [found["values"][f"{key}@0000048"] for key in (f"nll_{condition}", "nll", f"gain_over_{condition}")]
        assert values[2] == pytest.approx(values[0] - values[1])
    assert found["record"]["own_document_share"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_lengths": [12]}, r"two pieces of 4 tokens from each of 3 documents \(multiples of 12"),
        ({"context_lengths": [40]}, r"multiples of 12\), found \[40\]"),
        ({"riffled_documents": 24, "context_lengths": [192]}, "a longer one needs 25 longer documents"),
        ({"riffled_documents": 1}, "at least 2"),
    ],
)
def test_what_cannot_be_riffled_is_one_sentence(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        riffled(tmp_path, **options)
