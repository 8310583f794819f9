"""The verdict at the top of the page: short, and true of planted curves."""

import re

import numpy as np
import pytest
from document_sums import LENGTHS, sums

from sbeval.reports.analyse.claims import LengthClaims, length_claims
from sbeval.reports.analyse.verdicts import verdict_sentences
from sbeval.reports.read.fields import length_text


def claim(
    curve: list[float], *, trained: int = 1024, documents: int = 40, noise: float = 0.01, seed: int = 0
) -> LengthClaims:
    return length_claims(sums(curve, documents=documents, noise=noise, seed=seed), trained)


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([2.2, 2.1, 2.0, 3.5, 5.5], r"m breaks past 1K \(\+3.\d+ nats at 4K\)."),
        ([2.2, 2.1, 2.0, 2.0, 5.5], r"m breaks past 2K \(\+3.\d+ nats at 4K\)."),
        ([2.2, 2.1, 2.0, 2.05, 2.1], r"m gets worse past 1K \(\+0.(10|099) nats at 4K\)."),
        ([2.2, 2.1, 2.0, 3.5, 2.0], r"m breaks past 1K \(\+1.\d+ nats at 2K\)."),
        ([2.2, 2.1, 2.0, 1.9, 1.8], r"m keeps improving to 4K."),
        ([2.2, 2.1, 2.0, 1.9, 1.9], r"m improves past 1K \(\N{MINUS SIGN}0.\d+ nats at 4K\)."),
        ([2.2, 2.1, 2.0, 2.0, 2.0], r"m shows neither a gain at 4K nor a loss past 1K."),
        ([2.2, 2.1, 2.0, 1.9, 2.0], r"m shows neither a gain at 4K nor a loss past 1K."),
    ],
)
def test_the_verdict_names_the_lengths_and_the_change(curve: list[float], verdict: str) -> None:
    assert re.fullmatch(verdict, verdict_sentences("fixed_target", [("m", claim(curve, noise=0.002))]))


def test_a_model_that_gets_worse_by_less_than_the_least_context_costs_does_not_break() -> None:
    slight, late = [2.2, 2.1, 2.0, 2.1, 2.1], [2.2, 2.1, 2.0, 2.1, 3.0]
    assert not claim(slight, noise=0.002).breaks
    assert not claim(late, noise=0.002).breaks, "it already gets worse at 2K"
    assert claim([2.2, 2.1, 2.0, 2.3, 2.3], noise=0.002).breaks
    assert not claim([2.2, 2.3, 2.4, 2.5, 2.6], trained=256, noise=0.002).breaks, "one shorter length shows no break"


def test_windows_without_identical_targets_never_show_that_a_model_improves() -> None:
    words = verdict_sentences("stream", [("m", claim([2.2, 2.1, 2.0, 1.9, 1.8]))])
    assert words == "m shows no loss from 1K to 4K."


def test_models_with_the_same_result_share_a_sentence_and_what_gets_worse_comes_first() -> None:
    rising, falling = [2.2, 2.1, 2.0, 3.5, 5.5], [2.2, 2.1, 2.0, 1.9, 1.8]
    of_models = [(f"m{place}", claim((falling, rising)[place % 2], seed=place)) for place in range(7)]
    breaks, improves = verdict_sentences("fixed_target", of_models).split(". ")
    assert re.fullmatch(r"m1, m3 and m5 break past 1K \(\+3.\d+( to \+3.\d+)? nats at 4K\)", breaks)
    assert improves == "m0, m2, m4 and m6 keep improving to 4K."


def test_many_results_are_one_sentence_a_kind() -> None:
    curves = [[3.0, *[2.0] * place, *[3.0 + place] * (4 - place)] for place in range(2, 4)]
    lengths = [512, 1024, 2048]
    of_models = [
        (f"m{trained}-{place}", claim(curve, trained=trained))
        for trained in lengths
        for place, curve in enumerate(curves)
    ]
    of_models += [(f"n{trained}", claim([2.2, 2.1, 2.0, 1.9, 1.8], trained=trained)) for trained in lengths]
    of_models += [(f"f{trained}", claim([2.0] * 5, trained=trained)) for trained in lengths]
    sentences = re.findall(r"[^.]+(?:\.\d[^.]*)*\.", verdict_sentences("fixed_target", of_models))
    assert len(sentences) <= 4


TRUTHS = [
    [2.2, 2.1, 2.0, 2.0, 3.0],
    [2.0] * 5,
    [2.2, 2.1, 2.0, 1.95, 1.9],
    [2.2, 2.1, 2.0, 2.0, 2.05],
    [2.01, 2.0, 1.99, 1.98, 1.97],
    [2.2, 2.1, 2.0, 2.2, 2.2],
]


def is_false(verdict: str, truth: list[float]) -> bool:
    """Whether a verdict on a model trained at 1K claims something that is not so."""
    at = {length_text(length): nll for length, nll in zip(LENGTHS, truth, strict=True)}
    if worse := re.search(r"(breaks|gets worse) past (\w+) .*nats at (\w+)", verdict):
        first = [*at][[*at].index(worse[2]) + 1]
        shorter = truth[: [*at].index(first)]
        return min(at[first], at[worse[3]]) <= at["1K"] or (worse[1] == "breaks" and at[first] <= max(shorter))
    if "keeps improving" in verdict:
        return not truth[-1] < truth[-2] or not truth[-1] < at["1K"]
    if "improves" in verdict:
        return not truth[-1] < at["1K"]
    assert "neither" in verdict
    return False


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
def test_the_verdict_on_a_planted_truth_is_seldom_false(truth: list[float]) -> None:
    """In 5% of draws at most; of 36 draws, 6 are seen once in a hundred times that they would be 5%."""
    random = np.random.default_rng(0).integers(1 << 30, size=36)
    drawn = [
        claim(truth, documents=(20, 40, 100)[place % 3], noise=0.1, seed=int(seed)) for place, seed in enumerate(random)
    ]
    assert sum(is_false(verdict_sentences("fixed_target", [("m", each)]), truth) for each in drawn) < 6
