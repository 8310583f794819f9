"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval.

- `build`: how does a report come about, from files to files?
- `assemble`: which sections, findings and caveats does it have?
- `compare`: do two models differ on identical targets?
- `watch`: how is it built again while runs go on?
- `read`: from results files to typed rows
- `analyse`: from rows to what may be said about them
- `sections`: one file a section of the page
- `figures`: one function a figure
- `write`: what a report leaves on disk
"""

from sbeval.reports.build import build_report, load_results
from sbeval.reports.compare import Comparison, compare
from sbeval.reports.watch import watch

__all__ = ["Comparison", "build_report", "compare", "load_results", "watch"]
