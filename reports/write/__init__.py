"""What a report leaves on disk.

- `html`: the page, from templates
- `paper`: figures and tables for a paper
- `exports`: Markdown, LaTeX and the tidy table, and which files did a report write?
"""
