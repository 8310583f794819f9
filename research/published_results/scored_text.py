"""Which part of the held-out text was scored, and how far seeds and documents move what came out."""

from research.published_results.found import FIXED, NAMES, STREAM, Found, multiple_name, table
from sbeval.reports.analyse.overview import DOUBTFUL
from sbeval.results.intervals import UNEVEN_COVERAGE, ratio_interval

DOUBTFUL_NOTE = (
    f"{DOUBTFUL} doubtful: these files differ so much in size that 95% intervals cover {UNEVEN_COVERAGE} in "
    "simulations (`research/interval_studies/coverage.py`)."
)


def scored(found: Found) -> str:
    """Says which part of the held-out text was scored, and how often the training tokens repeat."""
    parts = []
    for task in (STREAM, FIXED):
        sums = found.sums["stickbreaking", task]
        parts.append(f"`{task}` scores {int(sums.tokens[:, 0].sum()):,} targets in {len(sums.clusters)} files")
    record = found.records["scheme_stickbreaking"]
    held, blocks = record["data"]["held_out"], int(found.plan["stream_blocks"])
    return (
        f"A part of the held-out text was scored: of its {held['tokens']:,} tokens in {held['files']} files "
        f"{' and '.join(parts)} (`--limit {blocks}` blocks of the longest length, and "
        f"`--limit {found.plan['target_blocks']}` runs of targets). The training text has {record['unique_tokens']:,} "
        f"different tokens, which a whole run sees {record['epochs']:.1f} times."
    )


def seed_spread(found: Found, task: str) -> list[str]:
    rows = []
    for scheme in ("stickbreaking", "rope"):
        for multiple in (1, 4, 16, 64) if task == STREAM else (1, 4, 16):
            values = [v for run in found.seeds(scheme) if (v := found.nll(run, task, multiple)) is not None]
            width = interval(found, scheme, task, multiple)
            spread = f"{min(values):.3f} to {max(values):.3f} ({len(values)})" if values else "-"
            rows.append([NAMES[scheme], multiple_name(multiple), spread, width])
    return table(["scheme", "context", "lowest to highest of the seeds", "95% interval over documents, seed 0"], rows)


def interval(found: Found, scheme: str, task: str, multiple: float) -> str:
    """The 95% interval over documents, computed from the sums by document; a dagger where it is doubtful."""
    sums = found.sums.get((scheme, task))
    length = round(multiple * found.length)
    if sums is None or length not in sums.lengths:
        return "-"
    column = sums.lengths.index(length)
    nll, tokens = sums.nll_nats[:, column], sums.tokens[:, column]
    estimate = ratio_interval(nll, tokens, seed=0)
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"{estimate.low:.3f} to {estimate.high:.3f}{found.doubt(scheme, task)}"
