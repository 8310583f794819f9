import numpy as np
import pytest

from sbeval.reports.claims import length_claims
from sbeval.reports.samples import DocumentSums

LENGTHS = [256, 512, 1024, 2048, 4096]


def sums(curve: list[float], *, documents: int = 40, noise: float = 0.01, seed: int = 0) -> DocumentSums:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(500, 5000, documents).astype(float)
    level = generator.normal(0, 0.3, documents)
    table = {}
    for length, nll in zip(LENGTHS, curve, strict=True):
        nats = (nll + level + generator.normal(0, noise, documents)) * tokens
        rows = np.stack([nats, tokens, 3 * tokens], axis=1)
        table[length] = {f"document {index}": row for index, row in enumerate(rows)}
    return DocumentSums(table)


def test_a_curve_that_keeps_falling_lowers_to_the_end_and_never_raises() -> None:
    claims = length_claims(sums([2.2, 2.1, 2.0, 1.9, 1.8]), 1024)
    assert claims.lowers_to_tokens == 4096
    assert claims.raises_from_tokens is None
    assert claims.reference_tokens == 1024
    assert {item.context_length_tokens: round(item.estimate, 1) for item in claims.differences} == {
        256: 0.2,
        512: 0.1,
        2048: -0.1,
        4096: -0.2,
    }


def test_a_curve_that_breaks_lowers_to_the_training_length_and_raises_from_twice_it() -> None:
    claims = length_claims(sums([2.2, 2.1, 2.0, 3.1, 4.0]), 1024)
    assert claims.lowers_to_tokens == 1024
    assert claims.raises_from_tokens == 2048
    assert all(item.low > 0 for item in claims.differences if item.context_length_tokens > 1024)


def test_a_flat_curve_neither_lowers_nor_raises() -> None:
    claims = length_claims(sums([2.0] * 5, seed=3), 1024)
    assert claims.lowers_to_tokens is None
    assert claims.raises_from_tokens is None


def test_differences_are_paired_so_a_small_gain_shows_through_large_spread_of_documents() -> None:
    claims = length_claims(sums([2.02, 2.015, 2.01, 2.0, 1.99], noise=0.002), 1024)
    longest = claims.differences[-1]
    assert longest.high < 0
    assert longest.high - longest.low < 0.01


def test_a_training_length_between_two_lengths_is_compared_from_below() -> None:
    assert length_claims(sums([2.2, 2.1, 2.0, 1.9, 1.8]), 1500).reference_tokens == 1024


@pytest.mark.parametrize("trained", [None, 128])
def test_no_length_within_the_training_length_leaves_no_reference(trained: int | None) -> None:
    claims = length_claims(sums([2.2, 2.1, 2.0, 1.9, 1.8]), trained)
    assert claims.reference_tokens is None
    assert claims.differences == ()
    assert claims.lowers_to_tokens == 4096


def test_documents_with_other_targets_at_some_length_do_not_enter() -> None:
    table = sums([2.2, 2.1, 2.0, 1.9, 1.8])
    table.tokens[0, 2] += 1
    assert length_claims(table, 1024).clusters == 39


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (None, "samples were not logged"),
        (sums([2.2, 2.1, 2.0, 1.9, 1.8], documents=12), "only 12 documents"),
    ],
)
def test_what_stands_in_the_way_is_said(table: DocumentSums | None, words: str) -> None:
    claims = length_claims(table, 1024)
    assert words in claims.obstacle
    assert claims.lowers_to_tokens is None


def test_few_documents_give_differences_without_intervals_and_no_claim() -> None:
    claims = length_claims(sums([2.2, 2.1, 2.0, 1.9, 1.8], documents=12), 1024)
    assert claims.differences[-1].estimate == pytest.approx(-0.2, abs=0.02)
    assert np.isnan(claims.differences[-1].low)
    assert claims.raises_from_tokens is None
