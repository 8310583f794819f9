"""Notebooks as pages: their text, and their code in fences."""

import json
from pathlib import Path


def as_markdown(notebook: Path) -> str:
    """Returns the cells of a notebook as Markdown, with a link to the notebook below the title."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    blocks = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    blocks.insert(1, f"This page is the notebook [{notebook.name}]({notebook.name}), which the tests run.")
    return "\n\n".join(blocks) + "\n"
