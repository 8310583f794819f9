import importlib
from dataclasses import replace

import numpy as np
import pytest

from sbeval.reports.read.samples import SumsByDocument

MODULES = ("found", "claims", "figures", "packed", "write_pages", "fire_rates")
LENGTHS = [256 * 2**power for power in range(9)]


@pytest.fixture(scope="module")
def pages():
    return {name: importlib.import_module(f"research.published_results.{name}") for name in MODULES}


def results(pages, *, beyond: dict[str, float], seeds: int, at_training_length: dict[str, float] | None = None):
    """Results in which a scheme's NLL changes by `beyond[scheme]` past its training length, in all of 30 files."""
    draw = np.random.default_rng(0)
    level = 2.0 + 0.1 * draw.standard_normal(30)
    metrics, sums = {}, {}
    for scheme, change in beyond.items():
        for seed in range(seeds):
            run = scheme if seed == 0 else f"{scheme}_seed{seed}"
            base = (at_training_length or {}).get(scheme, 0.0) + 0.001 * seed
            nll = {length: base + (change if length > 1024 else 0.0) for length in LENGTHS}
            noise = {length: 0.01 * draw.standard_normal(30) for length in LENGTHS}
            table = {
                length: {
                    f"file{index}": np.array([100 * (level[index] + nll[length] + noise[length][index]), 100.0, 300.0])
                    for index in range(30)
                }
                for length in LENGTHS
            }
            for task in ("sb_stdlib_stream", "sb_stdlib_fixed_target"):
                sums[run, task] = SumsByDocument(table)
                column = sums[run, task].nll_nats.sum(0) / sums[run, task].tokens.sum(0)
                metrics[run, task] = {f"nll@{length:07d}": value for length, value in zip(LENGTHS, column, strict=True)}
    plan = {"shrink": 1, "seeds": seeds, "needle_samples": 5, "recall_steps": 10}
    return pages["found"].Found(
        metrics=metrics, sums=sums, records={}, recall=[], speed=[], plan=plan, jobs=[], gpu_hours=0.0
    )


def verdict(pages, name: str, found) -> str:
    return getattr(pages["claims"], name)(found).verdict


def test_one_seed_never_holds_in_full(pages):
    gains = {"stickbreaking": -0.1, "rope": 2.0}
    assert verdict(pages, "_uses", results(pages, beyond=gains, seeds=1)) == "holds in part"
    assert verdict(pages, "_uses", results(pages, beyond=gains, seeds=3)) == "holds"


def test_one_seed_caps_what_does_not_hold_as_it_caps_what_holds(pages):
    losses = {"stickbreaking": 0.5, "rope": 2.0, "stickbreaking_remainder": 0.0}
    worse = {"stickbreaking_remainder": 0.1}
    found = results(pages, beyond=losses, seeds=1, at_training_length=worse)
    assert verdict(pages, "_uses", found) == verdict(pages, "_remainder", found) == "not shown"
    assert "NLL where the paper has accuracies" in pages["claims"]._remainder(found).evidence


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [((0.71, 0.70), "holds"), ((0.71, 0.97), "holds in part"), ((0.907, 1.036, 0.964), "does not hold")],
)
def test_a_slowdown_of_another_size_is_not_about_29_percent(pages, speeds, expected):
    found = results(pages, beyond={"stickbreaking": 0.0}, seeds=1)
    found.speed.extend(
        {"size": str(index), "attention": kind, "tokens_per_second": 1000.0 * speed}
        for index, own in enumerate(speeds)
        for kind, speed in (("stickbreaking", own), ("rope", 1.0))
    )
    assert verdict(pages, "_speed", found) == expected


def test_a_claim_that_the_numbers_deny_does_not_hold(pages):
    found = results(pages, beyond={"stickbreaking": 0.5, "rope": 2.0}, seeds=3)
    assert verdict(pages, "_uses", found) == "does not hold"
    assert verdict(pages, "_keeps", found) == "does not hold"
    worse = results(
        pages, beyond={"stickbreaking": 0.0, "rope": 0.0}, seeds=3, at_training_length={"stickbreaking": 0.1}
    )
    assert verdict(pages, "_at_training_length", worse) == "does not hold"
    better = results(pages, beyond={"stickbreaking": 0.0, "rope": 0.0}, seeds=3, at_training_length={"rope": 0.1})
    assert verdict(pages, "_at_training_length", better) == "holds"
    for run in ("rope", "rope_seed1", "rope_seed2"):  # what identical targets do not show holds in part
        better.sums[run, "sb_stdlib_fixed_target"] = better.sums[
            run.replace("rope", "stickbreaking"), "sb_stdlib_fixed_target"
        ]
    assert verdict(pages, "_at_training_length", better) == "holds in part"


def test_stream_alone_never_holds_in_full(pages):
    found = results(pages, beyond={"stickbreaking": -0.1, "rope": 2.0}, seeds=3)
    assert verdict(pages, "_keeps", found) == verdict(pages, "_best_scheme", found) == "holds in part"


def test_missing_results_are_not_measured(pages):
    page = pages["claims"].claims_page(results(pages, beyond={}, seeds=1))
    assert page.count("**not measured**") == 11


def test_differences_are_paired_over_files(pages):
    found = results(pages, beyond={"stickbreaking": -0.1}, seeds=1)
    estimate, low, high = found.gain(("stickbreaking", 16), ("stickbreaking", 1), "sb_stdlib_fixed_target")
    assert low < -0.1 < high
    assert high - low < 0.03
    assert estimate == pytest.approx(-0.1, abs=0.01)
    assert found.gain(("stickbreaking", 16), ("nope", 1), "sb_stdlib_fixed_target") is None


def test_rope_s_break_may_hold_and_what_scaling_does_to_it_rests_on_one_seed(pages):
    beyond = {"stickbreaking": 0.0, "rope": 3.0, "rope_dynamic1": 2.0, "rope_dynamic4": 1.0}
    found = results(pages, beyond=beyond, seeds=3)
    assert verdict(pages, "_rope_breaks", found) == "holds"
    assert verdict(pages, "_scaling_softens", found) == "holds in part"
    mended = results(pages, beyond=beyond | {"rope_dynamic1": -0.1, "rope_dynamic4": -0.1}, seeds=3)
    assert verdict(pages, "_scaling_softens", mended) == "not shown"


def test_an_unsolved_cell_says_how_long_and_at_which_rates_it_was_tried(pages):
    def run(attention, pairs, rate, steps, accuracy):
        cell = {"attention": attention, "pairs": pairs, "learning_rate": rate, "steps_taken": steps}
        return cell | {"accuracy": accuracy, "solved": accuracy >= 0.99, "sequences_seen": 64 * steps}

    found = results(pages, beyond={"stickbreaking": 0.0}, seeds=1)
    found.recall.extend([run("stickbreaking", 128, 1e-3, 500, 0.995), run("rope", 64, 1e-3, 900, 0.992)])
    found.recall.extend([run("rope", 128, 1e-2, 300, 0.5), run("rope", 128, 2e-3, 16000, 0.4)])
    claim = pages["claims"]._recall(found)
    assert claim.verdict == "holds in part"
    assert "rope at 128 pairs 0.500 within 16,000 steps, so long at a rate of 2.0e-03 only" in claim.evidence


def test_a_protocol_never_finished_is_said_plainly_and_is_a_row_without_numbers(pages):
    found = results(pages, beyond={"stickbreaking": 0.0, "fire": 0.5}, seeds=1)
    del found.metrics["fire", "sb_stdlib_stream"]
    found.plan["recall_pairs"] = []
    text = "\n".join(pages["write_pages"].missing(found))
    assert "FIRE under `sb_stdlib_stream` was never finished" in text
    assert "`fire sb_stdlib_stream`" not in text
    assert any("FIRE (not finished) | - |" in row for row in pages["write_pages"].curves(found, "sb_stdlib_stream"))
    assert not any("not finished" in row for row in pages["write_pages"].curves(found, "sb_stdlib_fixed_target"))
    assert pages["claims"]._best_scheme(found).evidence == ""
    rivals = results(pages, beyond={"stickbreaking": 0.0, "rope": 0.5}, seeds=1)
    assert "Not measured, so not among them: " in pages["claims"]._best_scheme(rivals).evidence


def test_a_scheme_added_later_is_said_to_be_and_is_missed_only_once_it_was_trained(pages):
    found = results(pages, beyond={"stickbreaking": 0.0}, seeds=1)
    found.plan["recall_pairs"] = []
    assert "forgetting" not in " ".join(pages["write_pages"].missing(found))
    found.records["scheme_forgetting"] = chosen(0.002)
    text = " ".join(pages["write_pages"].missing(found))
    assert "FoX (forget gates" in text
    assert "`forgetting sb_stdlib_stream`" in text


def chosen(rate):
    return {"recipe": {"optimization": {"learning_rate": rate}}}


def test_a_rate_at_the_edge_of_those_tried_is_named_beside_the_verdict_it_may_have_decided(pages):
    beyond = {"stickbreaking": 0.0, "stickbreaking_remainder": 0.0, "stickbreaking_remainder_norm": 0.0}
    found = results(pages, beyond=beyond, seeds=1)
    found.plan["learning_rates"] = [0.001, 0.002, 0.004]
    names = ("scheme_stickbreaking_remainder", "scheme_stickbreaking_remainder_norm")
    found.records.update(zip(names, map(chosen, (0.002, 0.004)), strict=True))
    evidence = pages["claims"]._remainder(found).evidence
    assert evidence.endswith("lie beyond: stick-breaking, remainder bias, head norm 0.004")


def test_fire_s_biases_go_further_at_a_rate_of_their_own_and_the_page_says_what_it_is_worth(pages):
    rates = pages["fire_rates"]
    source = rates.text()
    runs = [rates.train(source, attention, factor, steps=2) for attention, factor in rates.RUNS]
    rope, one, ten = runs
    assert rope["bias_range"] is None
    assert one["tokens"] == ten["tokens"] == rope["tokens"] == 2 * 8 * 256
    assert ten["bias_range"] > one["bias_range"]
    found = replace(
        results(pages, beyond={"fire": 0.0}, seeds=1),
        records={"scheme_fire": chosen(0.002)},
        fire_rates={"last_steps": 2, "runs": runs},
    )
    text = " ".join(pages["write_pages"].fire_rates(found))
    assert f"is {rope['nll']:.3f} with RoPE, with FIRE {one['nll']:.3f} with its biases learnt at the rate" in text
    assert f"{ten['nll']:.3f} with its biases learnt at 10 times" in text
    assert pages["write_pages"].fire_rates(replace(found, fire_rates=None)) == []


def test_after_extension_identical_targets_stand_beside_the_stream(pages):
    beyond = {"stickbreaking": 0.0, "stickbreaking_extended": -0.1, "rope_dynamic4": 1.0, "rope_extended": 0.5}
    found = results(pages, beyond=beyond, seeds=1)
    claim = pages["claims"]._extension(found)
    gain = found.gain(("rope_extended", 16), ("rope_extended", 4), "sb_stdlib_fixed_target")
    assert claim.verdict != "holds"
    assert claim.evidence.endswith(pages["found"].signed(gain))
