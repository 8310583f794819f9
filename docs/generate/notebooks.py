"""Notebooks as pages: their text, their code in fences, and its outputs.

`python docs/generate/notebooks.py` runs them and stores their outputs, without parts that differ between runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"


def as_markdown(notebook: Path) -> str:
    """Returns the cells of a notebook as Markdown, with a link to the notebook below the title."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    blocks = [block for cell in cells for block in _blocks(cell)]
    blocks.insert(1, f"This page is the notebook [{notebook.name}]({notebook.name}), which the tests run.")
    return "\n\n".join(blocks) + "\n"


def _blocks(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
    for output in cell.get("outputs", ()):
        drawn = output.get("data", {})
        if "image/png" in drawn:
            yield f"![figure](data:image/png;base64,{''.join(drawn['image/png']).replace(chr(10), '')})"
        else:
            yield f"```text\n{''.join(output.get('text') or drawn['text/plain']).rstrip()}\n```"


def run(notebook: Path) -> None:
    """Runs a notebook and stores what its cells print to standard output, return and draw."""
    import nbformat  # not needed to build the site
    from nbclient import NotebookClient

    cells = nbformat.read(notebook, as_version=4)
    NotebookClient(cells, timeout=600, kernel_name="python3").execute()
    for cell in cells.cells:
        cell.metadata.pop("execution", None)
        kept = [o for o in cell.get("outputs", ()) if o.get("name") != "stderr"]
        for output in kept:
            shown = output.get("data", {})
            for kind in [*shown]:
                if kind not in ("text/plain", "image/png") or ("image/png" in shown and kind == "text/plain"):
                    del shown[kind]
        if cell.cell_type == "code":
            cell.outputs = kept
    nbformat.write(cells, notebook)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        run(path)
