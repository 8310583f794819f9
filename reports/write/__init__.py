"""Writes the files of a report.

- `html`: the page, from templates
- `paper`: figures and tables for a paper
- `exports`: Markdown, LaTeX, CSV and Parquet files, and the manifest: names and hashes of all files of a report
"""
