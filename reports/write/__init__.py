"""What a report leaves on disk: the page, Markdown, LaTeX and the tidy tables."""
