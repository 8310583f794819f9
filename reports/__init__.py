"""Builds a report from lm-eval's result files: an HTML page, figures and tables. It imports neither torch nor lm_eval.

- `build`: builds a report: reads result files, assembles the sections, writes all files
- `read`: reads result files and samples files into typed rows
- `analyse`: statistics over these rows, and sentences on their results
- `figures`: builders of Vega-Lite figures and their image files
- `section`: the parts of a report: tables of typed cells, figures, sections
- `kinds`: one file for each kind of measurement, which builds its section
- `write`: writes the page, Markdown, LaTeX and CSV files
- `publish`: publishes results on the hub and in experiment trackers
- `pairs`: paired differences between two models, the one way in which sections, `judge` and `gate` compare them
- `spreads`: spreads of differences over documents, for planning a run
- `judge`: judges whether a model is worse than a reference model
- `gate`: judges a model by a policy, a file of rules over several tasks

Modules import only from modules further right: build -> {write, kinds} -> {pairs, figures, analyse} -> read. Reports
read only result files and samples files, so a report can be rebuilt years after its runs.
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
        import sbeval.policy  # imports pydantic, which building a page does not need

        return sbeval.policy.Rule
    raise AttributeError(f"module 'sbeval.reports' has no attribute {name!r}")
