"""`sbeval report --compare`: what is printed, and which exit code follows."""

from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.policy import read_policy

_NOT_ENOUGH_DATA = 3


def compare_command(
    reports: Any,
    pair: tuple[str, str],
    paths: list[Path],
    labels: dict[str, str],
    *,
    fail_if_worse: bool,
    least_effect: float | None,
    policy: Path | None,
) -> int:
    """Prints the comparison of two models, or with a policy its verdicts.

    Args:
        reports: the package `sbeval.reports`, which only `cli` may name.
        pair: the reference and the candidate.
        paths: results in which names are looked up.
        labels: names to show in place of the checkpoints' own.
        fail_if_worse: end with 1 where the candidate is worse.
        least_effect: what a whole band has to exceed to count; None for the usual.
        policy: a file of rules that judge the candidate, None to print the comparison.

    Returns:
        The exit code: 1 where the candidate is worse and that is to fail, or a rule fails; 3 where no rule fails and
        one has not enough data.

    Raises:
        UserError: options that make no sense together, and what `sbeval.reports.compare` and `gate` raise.
    """
    if policy is not None:
        if fail_if_worse or least_effect is not None:
            option = "--fail-if-worse" if fail_if_worse else "--least-effect"
            raise UserError(f"Expected --gate alone, found {option} too: the rules of the file say what counts.")
        rules = [reports.Rule(**settings) for settings in read_policy(policy)]
        judged = reports.gate(rules, *pair, paths=paths, labels=labels)
        print(judged.text())
        return {"pass": 0, "fail": 1}.get(judged.verdict, _NOT_ENOUGH_DATA)
    if least_effect is not None and not 0 <= least_effect < float("inf"):
        raise UserError(f"Expected --least-effect of 0 or more, found {least_effect:g}: give a number such as 0.02.")
    chosen = {} if least_effect is None else {"least_effect": least_effect}
    comparison = reports.compare(*pair, paths=paths, labels=labels, **chosen)
    print(comparison.text())
    if fail_if_worse and not comparison.judged:
        raise UserError(
            "Expected results on 20 documents or more with --fail-if-worse, found fewer, so that nothing is certain: "
            "evaluate more text."
        )
    return int(fail_if_worse and comparison.worse)
