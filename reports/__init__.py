"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval.

- `build`: the recipe, from files to files
- `read`: from results files to typed rows
- `analyse`: what may be said about them
- `figures`: how it is drawn
- `sections`: the parts of the page
- `assemble`: which parts there are, and what all of them are made from
- `table`: one table of typed cells for the page, Markdown and LaTeX
- `write`: what a report leaves on disk
- `publish`: results on the hub and in experiment trackers
- `pairs`: paired differences between two models
- `judge`: is one of them worse than the other?
- `gate`: a policy over several tasks at once
- `watch`: a report built again as results appear

Imports run one way: build -> write, assemble -> sections -> figures -> analyse -> read.
"""

from typing import TYPE_CHECKING, Any

from sbeval.reports.build import build_report, check_output_folder, load_results
from sbeval.reports.gate import Gate, gate
from sbeval.reports.judge import Comparison, compare
from sbeval.reports.watch import watch

if TYPE_CHECKING:
    from sbeval.policy import Rule

__all__ = [
    "Comparison",
    "Gate",
    "Rule",
    "build_report",
    "check_output_folder",
    "compare",
    "gate",
    "load_results",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "Rule":
        import sbeval.policy  # loads pydantic, which a page does without

        return sbeval.policy.Rule
    raise AttributeError(f"module 'sbeval.reports' has no attribute {name!r}")
