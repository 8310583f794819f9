from pathlib import Path

import pytest
from result_files import CURVES, model_record, perplexity_task, write_run

from sbeval.errors import UserError
from sbeval.reports import compare


def write(folder: Path, shift: float, **changes: object) -> Path:
    curve = [value + shift for value in CURVES["stickbreaking"]]
    record = {key: value for key, value in changes.items() if key in ("corpus_sha256", "tokenizer_sha256")}
    own = {key: value for key, value in changes.items() if key not in record}
    model = model_record("stickbreaking", checkpoint_sha256=f"{abs(shift):.3f}".ljust(64, "0"))
    write_run(folder, model, [perplexity_task("fixed_target", curve, **own, **record)])
    return folder


def test_a_checkpoint_that_got_worse_is_found_at_every_length(tmp_path: Path) -> None:
    comparison = compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.05))
    assert comparison.worse
    assert all(one.worse for one in comparison.lengths)
    assert [one.estimate for one in comparison.lengths] == pytest.approx([0.05] * 9, abs=0.015)
    assert "worse" in comparison.text()


def test_a_better_checkpoint_is_not_worse(tmp_path: Path) -> None:
    comparison = compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", -0.05))
    assert not comparison.worse
    assert all(one.high < 0 for one in comparison.lengths)


def test_the_same_results_differ_by_exactly_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 0.0)
    comparison = compare(folder, folder)
    assert not comparison.worse
    assert {one.estimate for one in comparison.lengths} == {0.0}


def test_models_can_be_named_within_one_folder(tmp_path: Path) -> None:
    for attention in ("stickbreaking", "rope"):
        write_run(tmp_path / attention, model_record(attention), [perplexity_task("stream", CURVES[attention])])
    comparison = compare("demo-sb", "demo-rope", paths=[tmp_path])
    assert comparison.worse
    assert [one.worse for one in comparison.lengths if one.context_length_tokens >= 2048] == [True] * 6


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    comparison = compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.1, tokenizer_sha256="ab" * 32))
    assert {one.unit for one in comparison.lengths} == {"bits per byte"}


def test_other_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="texts differ"):
        compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.1, corpus_sha256="dd" * 32))


def test_too_few_documents_are_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only 12 documents"):
        compare(write(tmp_path / "a", 0.0, documents=12), write(tmp_path / "b", 0.1, documents=12))


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="demo-sb"):
        compare("demo-sb", "nothing", paths=[write(tmp_path / "a", 0.0)])
