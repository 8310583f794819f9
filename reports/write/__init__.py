"""What a report leaves on disk: `html` fills the page, `exports` writes Markdown, LaTeX and the tidy table."""
