"""Reports: result files of lm-eval in; a page, figures and tables out. Imports no torch and no lm_eval."""

from sbeval.reports.build import build_report, load_results

__all__ = ["build_report", "load_results"]
