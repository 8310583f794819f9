import re

import numpy as np
import pytest
from document_sums import LENGTHS, sums
from hypothesis import given
from hypothesis import strategies as st
from result_files import model_record, perplexity_task, position_task, reported, write_pair, write_run

from sbeval.reports import build_report, compare
from sbeval.reports.analyse.claims import last_gain_step, length_claims
from sbeval.reports.analyse.findings import _context_sentence
from sbeval.reports.analyse.verdicts import DOUBTFUL
from sbeval.reports.kinds.position_sums import SumsByPosition, position_bands
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.samples import SumsByDocument
from tests.marks import exhaustive

FALLING = [2.2, 2.1, 2.0, 1.9, 1.8]


def test_a_curve_that_keeps_falling_lowers_to_the_end_and_never_raises():
    claims = length_claims(sums(FALLING), 1024)
    assert (claims.lowers_to_tokens, claims.raises_from_tokens) == (4096, None)
    estimates = {item.context_length_tokens: round(item.estimate, 1) for item in claims.differences}
    assert estimates == {256: 0.2, 512: 0.1, 2048: -0.1, 4096: -0.2}


def test_differences_are_paired_so_a_small_gain_shows_through_large_spread_of_documents():
    longest = length_claims(sums([2.02, 2.015, 2.01, 2.0, 1.99], noise=0.002), 1024).differences[-1]
    assert longest.high < 0
    assert longest.high - longest.low < 0.01


@pytest.mark.parametrize(
    ("trained", "reference"), [(None, None), (128, None), (1024, 1024), (1500, 1024), (4096, 4096)]
)
def test_the_reference_is_the_longest_length_within_the_training_length_and_gains_do_not_depend_on_it(
    trained, reference
):
    claims = length_claims(sums(FALLING), trained)
    assert claims.reference_tokens == reference
    assert (claims.differences == ()) is (reference is None)
    assert claims.lowers_to_tokens == 4096


def test_an_extension_evaluated_beyond_its_origin_alone_is_compared_with_its_own_length():
    assert length_claims(sums(FALLING), 1024, origin_length_tokens=512).reference_tokens == 512
    assert length_claims(sums(FALLING), 1024, origin_length_tokens=128).reference_tokens == 1024


def test_documents_with_other_targets_at_some_length_do_not_enter():
    table = sums(FALLING)
    table.tokens[0, 2] += 1
    assert length_claims(table, 1024).clusters == 39


@pytest.mark.parametrize(
    ("table", "words"), [(None, "samples were not logged"), (sums(FALLING, documents=12), "too few documents")]
)
def test_what_stands_in_the_way_is_said(table, words):
    claims = length_claims(table, 1024)
    assert words in claims.obstacle
    assert (claims.lowers_to_tokens, claims.raises_from_tokens, claims.doubtful) == (None, None, False)
    if table is not None:
        assert claims.differences[-1].estimate == pytest.approx(-0.2, abs=0.02)
        assert np.isnan(claims.differences[-1].low)


@pytest.mark.parametrize(
    ("curve", "lowers_to", "raises_from"),
    [
        ([2.2, 2.1, 2.0, 1.9, 1.9], 2048, None),
        ([2.2, 2.0, 2.0, 2.0, 2.0], 512, None),
        ([2.0, 2.0, 2.0, 2.0, 2.0], None, None),
        ([2.2, 2.1, 2.0, 3.1, 4.0], 1024, 2048),
        ([2.2, 2.1, 2.0, 2.3, 1.8], 1024, 2048),
        ([2.2, 2.1, 2.0, 1.9, 2.4], 2048, 4096),
        ([2.0, 2.1, 2.2, 2.3, 2.4], None, 2048),
        ([2.2, 2.1, 2.2, 2.0, 1.7], 512, None),
        ([2.2, 2.1, 2.1, 2.1, 2.0], 4096, None),
    ],
    ids=["gain, flat", "early gain", "flat", "break", "break, deeper", "gain, break", "rising", "up, down", "pause"],
)
def test_more_context_lowers_nll_up_to_the_last_step_down_before_a_step_up(curve, lowers_to, raises_from):
    claims = length_claims(sums(curve, noise=0.02), 1024)
    assert (claims.lowers_to_tokens, claims.raises_from_tokens) == (lowers_to, raises_from)
    assert (claims.last_gain is None) == (lowers_to is None)


def test_a_slow_gain_names_no_length_whose_own_step_is_not_shown():
    claims = length_claims(sums([2.00, 1.99, 1.98, 1.97, 1.96], noise=0.04, seed=5), 256)
    assert claims.lowers_to_tokens is None
    assert claims.differences[-1].high < 0
    assert length_claims(sums([2.2, 2.1, 2.1, 2.1, 2.0], noise=0.08, seed=2), 1024).lowers_to_tokens in (512, 4096)


def uneven_sums(*, lengths: int = 5, documents: int = 40) -> SumsByDocument:
    sizes = np.random.default_rng(0).lognormal(0, 1.5, documents)
    even = sums(FALLING, documents=documents)
    columns = [sizes * even.nll_nats.T, sizes * even.tokens.T, sizes * even.bytes.T]
    return SumsByDocument(
        {
            length: dict(zip(even.clusters, np.stack([column[index] for column in columns], axis=1), strict=True))
            for index, length in enumerate(LENGTHS[:lengths])
        }
    )


def test_documents_of_very_unequal_sizes_make_intervals_doubtful_whatever_else_is_in_the_way():
    assert not length_claims(sums(FALLING), 1024).doubtful
    assert length_claims(uneven_sums(), 1024).doubtful
    one = length_claims(uneven_sums(lengths=1), 1024)
    assert one.doubtful
    assert "only one context length" in one.obstacle
    elsewhere = uneven_sums()
    elsewhere.tokens += np.arange(5)
    assert length_claims(elsewhere, 1024).obstacle == "the lengths were not scored on the same targets"
    assert length_claims(elsewhere, 1024).doubtful


CURVE = [2.2, 2.1, 2.0, 1.9]


@pytest.mark.parametrize(
    ("task", "log_samples", "doubted"),
    [
        (perplexity_task("stream", CURVE, lengths=LENGTHS[:4], size_log_deviation=1.6), True, True),
        (perplexity_task("stream", CURVE, lengths=LENGTHS[:4], uneven_documents=True), False, True),
        (perplexity_task("stream", CURVE, lengths=LENGTHS[:4]), True, False),
        *exhaustive(
            (perplexity_task("stream", CURVE[:1], lengths=[512], size_log_deviation=1.6), True, True),
            (position_task([2.0] * 9, by_document=False, uneven_documents=True), False, True),
            (perplexity_task("stream", CURVE, lengths=LENGTHS[:4], uneven_documents=False), False, False),
            (position_task([2.0] * 9), True, False),
        ),
    ],
    ids=["uneven", "not logged", "even", "one length", "by position", "even, not logged", "even by position"],
)
def test_intervals_over_uneven_documents_are_marked(tmp_path, task, log_samples, doubted):
    write_run(tmp_path / "runs", model_record("stickbreaking"), [task], log_samples=log_samples)
    build_report([tmp_path / "runs"], tmp_path / "report", image_formats=())
    for name in ("summary.md", "index.html"):
        text = (tmp_path / "report" / name).read_text(encoding="utf-8")
        assert (DOUBTFUL in text) is doubted
        assert ("doubtful" in text) is doubted


def test_intervals_by_position_over_uneven_documents_are_doubtful():
    random = np.random.default_rng(0)
    for deviation, expected in ((0.2, False), (1.6, True)):
        tokens = np.maximum(1, 200 * random.lognormal(0, deviation, 40)).round()
        own, base = (
            SumsByPosition(
                sums={
                    (first, first + 9): {
                        f"document {index}": np.array([nll * count, count])
                        for index, (nll, count) in enumerate(zip(random.normal(2, 0.1, 40), tokens, strict=True))
                    }
                    for first in (1, 11)
                }
            )
            for _ in range(2)
        )
        assert own.doubtful is expected
        bands, obstacle = position_bands(own, base)
        assert not obstacle
        assert [band.doubtful for band in bands.values()] == [expected, expected]


@given(signs=st.lists(st.sampled_from([-1, 0, 1]), max_size=8))
def test_the_step_named_is_the_last_gain_before_the_first_loss(signs):
    named = last_gain_step(signs)
    assert 1 not in signs[:named]
    assert named == 0 or signs[named - 1] == -1
    until_loss = [*signs, 1].index(1)
    assert -1 not in signs[named:until_loss]


TRUTHS = {
    "breaks at 4K": [2.2, 2.1, 2.0, 2.0, 3.0],
    "flat": [2.0] * 5,
    "uses context": [2.2, 2.1, 2.0, 1.95, 1.9],
    "slightly worse late": [2.2, 2.1, 2.0, 2.0, 2.05],
    "small gains": [2.01, 2.0, 1.99, 1.98, 1.97],
    "failed extension": [2.2, 2.1, 2.0, 3.3, 4.0],
}


def is_false(sentence: str, truth: list[float]) -> bool:
    """Whether what a sentence claims of a model trained at 1K is not so."""
    tokens = {length_text(length): length for length in LENGTHS}
    at = dict(zip(LENGTHS, truth, strict=True))
    false = []
    if worse := re.search(r"from (\w+) on", sentence):
        false.append(at[tokens[worse[1]]] <= at[1024])
    if harmless := re.search(r"a rise(?: of more than ([\d.]+) nats)? is ruled out", sentence):
        false.append(max(at[2048], at[4096]) - at[1024] > float(harmless[1] or 0))
    if lowers := re.search(r"lowers NLL (?:up|all the way) to (\w+)", sentence):
        place = LENGTHS.index(tokens[lowers[1]])
        false.append(truth[place] >= truth[place - 1])
    assert worse or harmless
    return any(false)


@pytest.mark.parametrize("truth", TRUTHS)
def test_what_a_page_says_of_planted_truths_is_seldom_false(truth):
    """In 5% of draws at most; of 36 draws, 6 are seen once in a hundred times that they would be 5%."""
    claims = [
        length_claims(sums(TRUTHS[truth], documents=documents, noise=0.1, seed=seed), 1024)
        for documents in (20, 40, 100)
        for seed in range(12)
    ]
    said = [_context_sentence("text", claim) for claim in claims]
    assert sum(is_false(sentence, TRUTHS[truth]) for sentence in said) < 6


def test_an_extension_that_fails_is_judged_against_the_length_before_it(tmp_path):
    base = model_record("rope", name="base", checkpoint_sha256="a" * 64)
    origin = {"name": "base", "sha256": "a" * 64, "training_length_tokens": 1024}
    extended = model_record("rope", name="extended", training_length_tokens=2048, extended_from=origin)
    for model, curve in ((base, [2.0, 1.9, 3.3]), (extended, [2.6, 3.7, 5.0])):
        task = perplexity_task("fixed_target", curve, lengths=[512, 1024, 2048])
        write_run(tmp_path / "runs" / model.name, model, [task])
    folder = build_report([tmp_path / "runs"], tmp_path / "report", image_formats=()).parent
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert re.search(r"extended.*from 2K on, within its stated 2K, NLL is above its value at 1K", summary)
    assert "not evaluated" not in (folder / "latex" / "overview.tex").read_text(encoding="utf-8")


@pytest.mark.parametrize("protocol", ["fixed_target", "pairs", "riffled"])
def test_every_protocol_of_identical_targets_shows_use_of_context(protocol, tmp_path):
    for name in (protocol, "stream"):
        write_pair(tmp_path / name, name)
    report = reported(tmp_path)
    (verdict,) = report.overview
    assert verdict.startswith("demo-rope breaks past 1K (+")
    assert not any("No result here shows" in remark for remark in report.caveats)
    assert all(finding.sentences[0].startswith("On identical targets") for finding in report.findings)
    assert {"needed", "maps", "numbers", "lengths"} <= {section.identifier for section in report.sections}
    judged = compare(*(tmp_path / protocol / name for name in ("rope", "stickbreaking")))
    assert any(f"{protocol}: effective length" in difference.group for difference in judged.effective)
