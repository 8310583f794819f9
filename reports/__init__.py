"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval.

`build` holds the recipe: `read/` turns files into rows, `assemble` turns rows into `sections/`, which draw on
`analyse/` (what may be said) and `figures/` (how it is drawn) and fill the typed cells of `table`; `write/` makes files
of them.
`compare` sets two models side by side, `watch` rebuilds a report as results appear.

Imports run one way: build -> write, assemble -> sections -> figures -> analyse -> read.
"""

from sbeval.reports.build import build_report, load_results
from sbeval.reports.compare import Comparison, compare
from sbeval.reports.watch import watch

__all__ = ["Comparison", "build_report", "compare", "load_results", "watch"]
