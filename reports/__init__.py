"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval.

- `build`: the recipe, from files to files; which kinds there are
- `read`: from results files to typed rows
- `analyse`: what may be said about them
- `figures`: how it is drawn
- `section`: what a report is made of: tables, figures, sections
- `kinds`: one file a kind of measurement: what it reads, draws and says
- `write`: what a report leaves on disk
- `publish`: results on the hub and in experiment trackers
- `pairs`: paired differences between two models
- `judge`: is one of them worse than the other?
- `gate`: a policy over several tasks at once

Imports run one way: build -> write, kinds -> figures -> analyse -> read.
"""

from typing import TYPE_CHECKING, Any

from sbeval.reports.build import build_report, check_output_folder, draw, load_results
from sbeval.reports.gate import Gate, gate
from sbeval.reports.judge import Comparison, compare
from sbeval.reports.read.files import watch

if TYPE_CHECKING:
    from sbeval.policy import Rule

__all__ = [
    "Comparison",
    "Gate",
    "Rule",
    "build_report",
    "check_output_folder",
    "compare",
    "draw",
    "gate",
    "load_results",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "Rule":
        import sbeval.policy  # loads pydantic, which a page does without

        return sbeval.policy.Rule
    raise AttributeError(f"module 'sbeval.reports' has no attribute {name!r}")
