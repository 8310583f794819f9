"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval."""

from sbeval.reports.build import build_report, load_results
from sbeval.reports.compare import Comparison, compare
from sbeval.reports.watch import watch

__all__ = ["Comparison", "build_report", "compare", "load_results", "watch"]
