"""Writes a report's files.

- `html`: the page, from templates
- `paper`: figures and tables for a paper
- `exports`: Markdown, LaTeX and CSV files, and the manifest of files that a report wrote
"""
