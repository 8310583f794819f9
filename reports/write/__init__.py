"""What a report leaves on disk.

- `html`: the page, from templates
- `exports`: Markdown, LaTeX and the tidy table, and which files did a report write?
"""
