import math
import re
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
    *lengths, beyond = comparison.lengths
    assert all(one.worse for one in lengths)
    assert [one.estimate for one in lengths] == pytest.approx([0.05] * 9, abs=0.015)
    # worse everywhere alike is no more worse beyond the training length than at it
    assert beyond.context_length_tokens is None
    assert beyond.low < 0 < beyond.high
    assert "worse" in comparison.text()


def test_a_better_checkpoint_is_not_worse(tmp_path: Path) -> None:
    comparison = compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", -0.05))
    assert not comparison.worse
    assert all(one.high < 0 for one in comparison.lengths if one.context_length_tokens)


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
    assert [one.worse for one in comparison.lengths if (one.context_length_tokens or 0) >= 2048] == [True] * 6


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    comparison = compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.1, tokenizer_sha256="ab" * 32))
    assert {one.unit for one in comparison.lengths} == {"bits per byte"}


def test_texts_without_a_hash_are_known_by_their_names(tmp_path: Path) -> None:
    for side, shift in (("a", 0.0), ("b", 0.05)):
        tasks = [
            perplexity_task("stream", [value + shift for value in CURVES["rope"]], corpus=corpus, corpus_sha256=None)
            for corpus in ("one", "other")
        ]
        write_run(tmp_path / side, model_record("rope", checkpoint_sha256=side * 64), tasks)
    comparison = compare(tmp_path / "a", tmp_path / "b")
    assert {one.corpus for one in comparison.lengths} == {"one", "other"}


def test_other_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="texts differ"):
        compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.1, corpus_sha256="dd" * 32))


@pytest.mark.parametrize("documents", [1, 12])
def test_too_few_documents_give_differences_without_intervals_or_verdicts(tmp_path: Path, documents: int) -> None:
    folders = [write(tmp_path / name, shift, documents=documents) for name, shift in (("a", 0.0), ("b", 0.4))]
    comparison = compare(*folders)
    assert [one.estimate for one in comparison.lengths[:-1]] == pytest.approx([0.4] * 9, abs=0.06)
    assert all(math.isnan(one.low) for one in comparison.lengths)
    assert (comparison.judged, comparison.worse) == (False, False)
    text = comparison.text()
    assert f"{documents} document{'s' if documents > 1 else ''};" in text
    assert "no intervals and no verdicts: they take 20 documents" in text
    assert "nan" not in text
    assert not re.search(r"(worse|better)$", text, flags=re.M)


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="demo-sb"):
        compare("demo-sb", "nothing", paths=[write(tmp_path / "a", 0.0)])


def test_a_difference_that_is_certain_and_small_does_not_count(tmp_path: Path) -> None:
    folders = write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.05)
    assert compare(*folders, least_effect=0.0).worse
    small = compare(*folders, least_effect=0.1)
    assert not small.worse
    assert all(one.worse for one in small.lengths if one.context_length_tokens)
    assert "too little to count" in small.text()


def test_bands_are_wider_where_more_is_compared_at_once(tmp_path: Path) -> None:
    model, other = (model_record("stickbreaking", checkpoint_sha256=str(name) * 64) for name in (1, 2))
    for name, record, shift in (("a", model, 0.0), ("b", other, 0.1)):
        curve = [value + shift for value in CURVES["stickbreaking"]]
        both = [perplexity_task(protocol, curve) for protocol in ("fixed_target", "stream")]
        write_run(tmp_path / f"{name}1", record, both[:1])
        write_run(tmp_path / f"{name}2", record, both)
    alone, together = (
        next(one for one in compare(tmp_path / f"a{count}", tmp_path / f"b{count}").lengths) for count in (1, 2)
    )
    assert alone.protocol == together.protocol
    assert alone.estimate == together.estimate
    assert together.high - together.low > 1.05 * (alone.high - alone.low)


def test_a_model_that_breaks_is_worse_only_by_a_good_part_of_what_the_reference_loses(tmp_path: Path) -> None:
    def written(name: str, at_the_end: float) -> Path:
        curve = [value + (at_the_end if index >= 5 else 0.0) for index, value in enumerate(CURVES["rope"])]
        record = model_record("rope", checkpoint_sha256=name * 64)
        write_run(tmp_path / name, record, [perplexity_task("fixed_target", curve)])
        return tmp_path / name

    reference = written("a", 0.0)
    alike, far = compare(reference, written("b", 0.15)), compare(reference, written("c", 1.5))
    assert any(one.worse for one in alike.lengths)
    assert not alike.worse
    assert far.worse
