"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval.

- `build`: the recipe, from files to files
- `read`: from results files to typed rows
- `analyse`: what may be said about them
- `figures`: how it is drawn
- `section`: what a part of the page is made of, and from what
- `table`: one table of typed cells for the page, Markdown and LaTeX
- `kinds`: one file a kind of measurement: what it reads, draws and says
- `assemble`: which kinds there are, and what all of them are made from
- `write`: what a report leaves on disk
- `publish`: results on the hub and in experiment trackers
- `compare`: two models on identical targets
- `gate`: a policy over several tasks at once
- `watch`: a report built again as results appear

Imports run one way: build -> write, assemble -> kinds -> figures -> analyse -> read.
"""

from sbeval.reports.build import build_report, check_output_folder, load_results
from sbeval.reports.compare import Comparison, compare
from sbeval.reports.gate import Gate, Rule, gate
from sbeval.reports.watch import watch

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
