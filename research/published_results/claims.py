"""The paper's claims, each judged by a rule that is written here and applied to the result files.

A claim holds at most in part where it rests on one seed, on `stream` alone, or on a scale the rule names; where one
seed does not show it, that is said and no more.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from research.published_results.found import FIXED, NAMES, STREAM, Found, multiple_name, number, signed
from research.published_results.paper_settings import settings_section
from sbeval.reports.analyse.claims import length_claims

FULL, PART, NOT = "holds", "holds in part", "does not hold"
UNSHOWN = "not shown"
"""What one seed does not show."""
OPEN = "not measured"
SLOWDOWN, SLOWDOWN_MARGIN = -0.29, 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of the paper.

    Attributes:
        where: in the paper.
        claim: what it says, in our words.
        verdict: what was found.
        evidence: the numbers.
    """

    where: str
    claim: str
    verdict: str
    evidence: str


def _nlls(found: Found, run: str, task: str, multiples: tuple[float, ...]) -> str:
    values = [(multiple, found.nll(run, task, multiple)) for multiple in multiples]
    return ", ".join(f"{multiple_name(multiple)} {value:.3f}" for multiple, value in values if value is not None)


def judged(shown: Sequence[bool], *, seeds: int, full: bool = True) -> str:
    """Returns the verdict on a claim of which each part was shown or not.

    Args:
        shown: one entry a part, such as a seed.
        seeds: how many training seeds the parts rest on; one caps both a "holds" and a "does not hold".
        full: whether it may hold in full.
    """
    if any(shown):
        return FULL if all(shown) and seeds > 1 and full else PART
    return NOT if seeds > 1 else UNSHOWN


def claims_page(found: Found) -> str:
    """Returns the page as Markdown."""
    claims = [
        _uses(found),
        _keeps(found),
        _at_training_length(found),
        _best_scheme(found),
        _rope_breaks(found),
        _scaling_softens(found),
        _remainder(found),
        _extension(found),
        _recall(found),
        _needles(found),
        _speed(found),
    ]
    rows = [f"| {one.where} | {one.claim} | **{one.verdict}** | {one.evidence} |" for one in claims]
    header = [
        "# The paper's claims, and what was found here",
        "",
        "Tan, Yang, Courville, Panda, Shen, *Scaling Stick-Breaking Attention* (ICLR 2025, arXiv 2410.17980), at the "
        "scale of [extrapolation](extrapolation/README.md): models of a few million parameters on Python source text, "
        'far smaller than the paper\'s. "Holds" means at this scale. A claim that rests on one seed, on unequal '
        'numbers of tokens or on `stream` alone holds in part at most, and what one seed does not show is "not shown", '
        "which is less than that it does not hold. Intervals with a dagger are doubtful, since the files of `stream` "
        "differ much in size. `claims.py` holds the rules, `write_pages.py` applies them to the result files.",
        "",
        "| where | claim | found | numbers (NLL in nats per token; differences with 95% intervals over files) |",
        "|---|---|---|---|",
    ]
    return "\n".join([*header, *rows, *settings_section(found)]).rstrip("\n") + "\n"


def _uses(found: Found) -> Claim:
    where, claim = "5.2, Figure 5", "Stick-breaking uses contexts beyond its training length."
    runs = [run for run in found.seeds("stickbreaking") if found.gain((run, 16), (run, 1), FIXED) is not None]
    gains = [gain for run in runs if (gain := found.gain((run, 16), (run, 1), FIXED)) is not None]
    if not gains:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    limits = [length_claims(found.sums.get((run, FIXED)), found.length).lowers_to_tokens or 0 for run in runs]
    verdict = judged([high < 0 for _, _, high in gains], seeds=len(gains))
    reached = ", ".join(multiple_name(limit / found.length) if limit else "nowhere" for limit in limits)
    evidence = (
        f"identical targets, 16x against 1x, seed by seed: {'; '.join(map(signed, gains))}; the last length measurably "
        f"below the one before it: {reached}"
    )
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _keeps(found: Found) -> Claim:
    where, claim = "5.2, Figure 5", "Stick-breaking does not break to 64x its training length."
    runs = found.seeds("stickbreaking")
    ends = [
        (end, start)
        for run in runs
        if (end := found.nll(run, STREAM, 64)) is not None and (start := found.nll(run, STREAM, 1)) is not None
    ]
    if not ends:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    kept = [end <= start for end, start in ends]
    lines = "; ".join(_nlls(found, run, STREAM, (1, 4, 16, 32, 64)) for run in runs)
    rises = [signed(found.gain((run, 64), (run, 16), STREAM), found.doubt(run, STREAM)) for run in runs]
    evidence = f"`stream` alone, seed by seed: {lines}. 64x against 16x: {'; '.join(rises)}"
    return Claim(where=where, claim=claim, verdict=judged(kept, seeds=len(kept), full=False), evidence=evidence)


def _at_training_length(found: Found) -> Claim:
    where, claim = "Table 2", "At its training length stick-breaking is better than softmax with RoPE."
    pairs = list(zip(found.seeds("stickbreaking"), found.seeds("rope"), strict=False))
    gains = {
        task: [gain for sb, rope in pairs if (gain := found.gain((sb, 1), (rope, 1), task)) is not None]
        for task in (STREAM, FIXED)
    }
    if not all(gains.values()):
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    better = [high < 0 for own in gains.values() for _, _, high in own]
    verdict = judged(better, seeds=len(pairs))
    evidence = "stick-breaking minus RoPE at 1x, seed by seed: " + ", ".join(
        f"{'; '.join(signed(gain, found.doubt('stickbreaking', task)) for gain in own)} ({name})"
        for name, (task, own) in zip(("`stream`", "identical targets"), gains.items(), strict=True)
    )
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _best_scheme(found: Found) -> Claim:
    where, claim = "5.2, Figure 5", "Beyond the training length no other scheme is as good as stick-breaking."
    others = [name for name in NAMES if not name.startswith("stickbreaking") and not name.endswith("_extended")]
    own = {multiple: found.nll("stickbreaking", STREAM, multiple) for multiple in (4, 16, 64)}
    parts, won = [], []
    for multiple, value in own.items():
        rivals = {name: nll for name in others if (nll := found.nll(name, STREAM, multiple)) is not None}
        if value is None or not rivals:
            continue
        best = min(rivals, key=lambda name: rivals[name])
        won.append(value < rivals[best])
        parts.append(f"{multiple_name(multiple)}: {value:.3f} against {rivals[best]:.3f} ({NAMES[best]})")
    if not parts:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    verdict = judged(won, seeds=1)
    evidence = f"`stream`, one seed of most schemes: {'; '.join(parts)}"
    if absent := [NAMES[name] for name in others if (name, STREAM) not in found.metrics]:
        evidence += f". Not measured, so not among them: {', '.join(absent)}"
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _rope_breaks(found: Found) -> Claim:
    where, claim = "5.2, Figure 5", "RoPE breaks beyond its training length."
    broken = [gain for run in found.seeds("rope") if (gain := found.gain((run, 4), (run, 1), FIXED)) is not None]
    if not broken:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    breaks = [low > 0 for _, low, _ in broken]
    verdict = judged(breaks, seeds=len(broken))
    evidence = f"identical targets, 4x against 1x, seed by seed: {'; '.join(map(signed, broken))}"
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _scaling_softens(found: Found) -> Claim:
    where = "5.2, Figure 5"
    claim = "Dynamic scaling at evaluation softens RoPE's break and does not mend it."
    kinds = {"dynamic:1": "rope_dynamic1", "dynamic:4": "rope_dynamic4"}
    saved = {kind: found.gain((name, 16), ("rope", 16), FIXED) for kind, name in kinds.items()}
    left = {kind: found.gain((name, 16), ("rope", 1), FIXED) for kind, name in kinds.items()}
    known = [gain for gain in (*saved.values(), *left.values()) if gain is not None]
    if len(known) < 2 * len(kinds):
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    softens = [saved[kind][2] < 0 and left[kind][1] > 0 for kind in kinds]
    lines = "; ".join(f"{kind} {_nlls(found, name, STREAM, (1, 4, 16))}" for kind, name in kinds.items())
    evidence = "one seed, identical targets at 16x: " + "; ".join(
        f"{kind} {signed(saved[kind])} against unscaled, {signed(left[kind])} against 1x" for kind in kinds
    )
    evidence += f". `stream`: unscaled {_nlls(found, 'rope', STREAM, (1, 4, 16))}; {lines}"
    return Claim(where=where, claim=claim, verdict=judged(softens, seeds=1), evidence=evidence)


def _remainder(found: Found) -> Claim:
    where, claim = "appendix, Table 5", "Remainder bias and head norm improve stick-breaking."
    gains = {
        name: found.gain((name, 1), ("stickbreaking", 1), FIXED)
        for name in ("stickbreaking_remainder", "stickbreaking_remainder_norm")
    }
    known = [gain for gain in gains.values() if gain is not None]
    if not known:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    verdict = judged([high < 0 for _, _, high in known], seeds=1)
    evidence = "one seed, NLL where the paper has accuracies; identical targets, minus plain stick-breaking at 1x: "
    evidence += "; ".join(
        f"{label} {signed(gain)}" for label, gain in zip(("bias", "bias and norm"), gains.values(), strict=True)
    )
    if edges := [f"{NAMES[name]} {rate:g}" for name in gains if (rate := found.edge_rate(name)) is not None]:
        evidence += f". Learning rate at the edge of those tried, a better one may lie beyond: {'; '.join(edges)}"
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _extension(found: Found) -> Claim:
    where = "Figure 8"
    claim = (
        "After context extension stick-breaking still goes on beyond the new length, and RoPE with scaling does not."
    )
    names = ("stickbreaking", "stickbreaking_extended", "rope_dynamic4", "rope_extended")
    lines = {name: _nlls(found, name, STREAM, (1, 4, 8, 16, 64)) for name in names}
    ends = {name: (found.nll(name, STREAM, 64), found.nll(name, STREAM, 4)) for name in names}
    if any(None in pair for pair in ends.values()):
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    goes_on = ends["stickbreaking_extended"][0] <= ends["stickbreaking_extended"][1]
    breaks = ends["rope_extended"][0] > ends["rope_extended"][1]
    verdict = judged([goes_on, breaks], seeds=1)
    evidence = "`stream`, one seed: " + "; ".join(f"{name} {line}" for name, line in lines.items())
    evidence += ". Identical targets, 8x and 16x against the new length: " + "; ".join(
        f"{name} {', '.join(signed(found.gain((name, multiple), (name, 4), FIXED)) for multiple in (8, 16))}"
        for name in names
        if name.endswith("_extended")
    )
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _recall(found: Found) -> Claim:
    where, claim = "5.1, Figure 3", "MQRAR is solved by softmax with RoPE up to 128 pairs, by stick-breaking up to 192."
    runs = {kind: [run for run in found.recall if run["attention"] == kind] for kind in ("stickbreaking", "rope")}
    if not all(runs.values()):
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    solved = {kind: sorted({run["pairs"] for run in own if run["solved"]}) for kind, own in runs.items()}
    tried = {kind: sorted({run["pairs"] for run in own}) for kind, own in runs.items()}
    ahead = max(solved["stickbreaking"], default=0) > max(solved["rope"], default=0)
    evidence = "; ".join(f"{kind} solved (0.99) {solved[kind]} of {tried[kind]} pairs" for kind in runs)
    for kind, own in runs.items():
        for pairs in sorted(set(tried[kind]) - set(solved[kind])):
            evidence += "; " + _unsolved(kind, pairs, [run for run in own if run["pairs"] == pairs])
    most = {kind: max(run["sequences_seen"] for run in own) for kind, own in runs.items()}
    evidence += (
        f"; one seed; the longest run saw {most['stickbreaking']:,} sequences with stick-breaking and "
        f"{most['rope']:,} with RoPE, where the first author's public code allows 6,400,000: too few to say that what "
        "was not solved cannot be"
    )
    verdict = judged([ahead], seeds=1)
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)


def _unsolved(kind: str, pairs: int, runs: Sequence[dict[str, Any]]) -> str:
    """Says what an unsolved cell rests on: its best accuracy, and the rates of its longest runs."""
    steps = max(run["steps_taken"] for run in runs)
    rates = sorted({run["learning_rate"] for run in runs if run["steps_taken"] == steps})
    best = max(run["accuracy"] for run in runs)
    return (
        f"{kind} at {pairs} pairs {best:.3f} within {steps:,} steps, so long at "
        f"{'rates' if len(rates) > 1 else 'a rate of'} {' and '.join(f'{rate:.1e}' for rate in rates)} only"
    )


def _needles(found: Found) -> Claim:
    where, claim = "RULER", "Stick-breaking retrieves beyond its training length, where RoPE does not."
    task = "sb_niah_single_1"
    scores = {
        name: [
            found.metrics.get((name, task), {}).get(f"score@{multiple * found.length:07d}") for multiple in (1, 4, 16)
        ]
        for name in ("stickbreaking", "rope", "rope_dynamic4", "stickbreaking_extended", "rope_extended")
    }
    if None in scores["stickbreaking"] + scores["rope"]:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    ahead = [sb > rope for sb, rope in zip(scores["stickbreaking"][1:], scores["rope"][1:], strict=True)]
    evidence = f"`{task}`, {found.plan['needle_samples']} samples, one seed, at 1x, 4x, 16x: " + "; ".join(
        f"{name} {', '.join(number(value, 2) for value in values)}" for name, values in scores.items()
    )
    return Claim(where=where, claim=claim, verdict=judged(ahead, seeds=1), evidence=evidence)


def _speed(found: Found) -> Claim:
    where, claim = "training speed", "Training with stick-breaking is about 29% slower than with FlashAttention."
    rates = {(row["size"], row["attention"]): row["tokens_per_second"] for row in found.speed}
    changes = {
        f"{size}, {kind}": rate / rates[size, "rope"] - 1
        for (size, kind), rate in rates.items()
        if kind != "rope" and (size, "rope") in rates
    }
    if not changes:
        return Claim(where=where, claim=claim, verdict=OPEN, evidence="")
    about = [abs(change - SLOWDOWN) <= SLOWDOWN_MARGIN for change in changes.values()]
    verdict = FULL if all(about) else PART if any(about) else NOT
    evidence = (
        "tokens per second against RoPE at length 4096, one run each, other kernels than the paper's for both; about "
        f"means within {100 * SLOWDOWN_MARGIN:.0f} points: "
    )
    evidence += "; ".join(f"{name}: {change:+.1%}" for name, change in changes.items())
    return Claim(where=where, claim=claim, verdict=verdict, evidence=evidence)
