"""What a report leaves on disk: the page, Markdown, LaTeX and the tidy tables.

- `page`: how is the page put together?
- `html`: which pieces of HTML is it made of?
- `plain_tables`: what is a table as plain text?
- `markdown`: the summary as Markdown
- `latex`: tables as LaTeX
- `exports`: the files beside the page
"""
