"""What others do beyond the training length without other weights, beside stick-breaking: tables and what they say."""

from research.paper_experiments.rivals import LENGTH_TOKENS, WAYS
from research.published_results.found import FIXED, STREAM, Found, multiple_name, number, signed, table

OWN = "demo_stickbreaking"
NAMES = {OWN: "stick-breaking"} | {
    "_".join(["demo_rope", *([end] if end else [])]): ", ".join(
        ["RoPE", *(f"`{one.partition('=')[2].replace('{out}/', '')}`" for one in arguments.split(",") if one)]
    )
    for end, arguments in WAYS.items()
}
MULTIPLES = {STREAM: (0.5, 1, 2, 4, 8, 16, 32, 64), FIXED: (0.5, 1, 2, 4, 8, 16)}


def rivals_section(found: Found) -> list[str]:
    """Returns the section of the page, nothing where no rival was run."""
    if not any((name, task) in found.metrics for name in NAMES if name != OWN for task in MULTIPLES):
        return []
    lines = [
        "## What others do at evaluation time",
        "",
        "The shipped checkpoints (`sbeval/demo/checkpoints`), RoPE and stick-breaking, both trained at 1x on the same "
        "524,288,000 tokens, four times as many as above, evaluated as above. RoPE as it was trained, with scaled "
        "frequencies, and with methods that change where its queries and keys are (`extrapolation=`, "
        "`rope_scaling=`): SelfExtend (group, window), dual chunk attention (chunk, local), sink tokens with a window, "
        "logits by the logarithm of the length. Numbers are tokens, chosen by the training length and not on any text; "
        "LongRoPE's factors alone were searched, on Python code of PyTorch's at 16x. "
        "SelfExtend knows distances up to group * (1024 - window) + window tokens and breaks beyond: "
        + "; ".join(f"`{name}` to {reach / LENGTH_TOKENS:.1f}x" for name, reach in _reaches(found))
        + "; the scaling by the logarithm is meant to go with scaled frequencies. "
        + "".join(f"Not run yet: {run}. " for run in _missing(found))
        + "Each model is one training run, and intervals are over documents.",
        "",
    ]
    for task, multiples in MULTIPLES.items():
        rows = [
            [name, *(number(found.nll(run, task, multiple)) for multiple in multiples)]
            for run, name in NAMES.items()
            if (run, task) in found.metrics
        ]
        if rows:
            lines += [
                f"`{task}`:",
                "",
                *table(["model", *map(multiple_name, multiples)], rows),
                *_best(found, task),
                "",
            ]
    return lines


def _reaches(found: Found) -> list[tuple[str, int]]:
    """Returns SelfExtend's settings that were run, with the longest distance in tokens that each knows."""
    numbers = {
        run: tuple(map(int, end.split("_")[-2:]))
        for end in WAYS
        if (run := f"demo_rope_{end}") and "self_extend" in end
    }
    return [
        (f"self_extend:{group}:{window}", group * (LENGTH_TOKENS - window) + window)
        for run, (group, window) in numbers.items()
        if (run, STREAM) in found.metrics
    ]


def _missing(found: Found) -> list[str]:
    return [
        f"{name} (`{task}`)" for run, name in NAMES.items() for task in MULTIPLES if (run, task) not in found.metrics
    ]


def _best(found: Found, task: str) -> list[str]:
    """Says at which lengths beyond 1x stick-breaking has the lowest NLL, and how far the best rival is from it."""
    ahead, compared = [], []
    for multiple in MULTIPLES[task]:
        own = found.nll(OWN, task, multiple)
        others = {run: nll for run in NAMES if run != OWN and (nll := found.nll(run, task, multiple)) is not None}
        if multiple > 1 and own is not None and others:
            best, length = min(others, key=lambda run: others[run]), multiple_name(multiple)
            ahead += [length] if own <= others[best] else []
            apart = signed(found.gain((best, multiple), (OWN, multiple), task), found.doubt(OWN, task))
            compared.append((length, f"at {length} {NAMES[best]}, {apart}"))
    if not compared:
        return []
    where = "at every length" if len(ahead) == len(compared) else f"at {', '.join(ahead)}" if ahead else "at no length"
    behind = [length for length, _ in compared if length not in ahead]
    where += f", but not at {', '.join(behind)}" if ahead and behind else ""
    rivals = "; ".join(text for _, text in compared)
    return [
        f"**Beyond 1x stick-breaking has the lowest NLL {where}.** The best rival of each length on these targets, its "
        f"NLL minus that of stick-breaking: {rivals}."
    ]
