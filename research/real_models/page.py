"""Writes the tables of docs/results/smollm2/README.md from the results of `evaluate`.

    mkdir -p build/smollm2 && tar xJf docs/results/smollm2/results.tar.xz -C build/smollm2
    sbeval report build/smollm2/results -o build/smollm2/report
    python -m research.real_models.page build/smollm2

`summary.md` of a report holds every table; the page takes those below, and the commands from `jobs.jsonl`.
"""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PAGE = Path("docs/results/smollm2/README.md")
TABLES = (
    "modules, fixed target: NLL",
    "modules, fixed target: paired NLL difference",
    "packages, fixed target: NLL",
    "packages, stream: NLL",
    "texts/wikitext, stream: NLL",
    "RULER scores, task by task",
    "Copying a passage",
    "JSON keys and values",
    "Attention: keys, weights, entropy",
)
FIGURES = {"modules-fixed_target-": "nll", "needles-niah_single_1": "needle"}
"""Beginning of a figure's name in the report to its name on the page."""
MARKS = ("<!-- tables -->", "<!-- end of tables -->")


def tables_of(summary: str) -> list[str]:
    """Returns the tables that the page shows, each with its title."""
    found = []
    for title in TABLES:
        match = re.search(rf"^\*\*{re.escape(title)}.*?(?=^\*\*|^#|\Z)", summary, re.MULTILINE | re.DOTALL)
        if match is None:
            raise SystemExit(f"summary.md has no table {title!r}: were all groups of evaluate run?")
        found.append(match[0].strip())
    return found


def main(arguments: Sequence[str]) -> None:
    """Command line of the page."""
    folder = Path(arguments[0])
    report = folder / "report"
    jobs = [json.loads(line) for line in (folder / "jobs.jsonl").read_text(encoding="utf-8").splitlines()]
    commands = "\n".join(f"# {job['job']}: {job['seconds']:.0f} s\n{job['command']}" for job in jobs)
    tables = tables_of((report / "summary.md").read_text(encoding="utf-8"))
    title = "<details><summary>Every command, with its seconds beside other jobs</summary>"
    listed = f"{title}\n\n```text\n{commands}\n```\n\n</details>"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text("\n\n".join([before + MARKS[0], *tables, listed, MARKS[1] + after]), encoding="utf-8")
    for beginning, name in FIGURES.items():
        (image,) = (
            file
            for file in (report / "figures").glob(f"{beginning}*.png")
            if not file.stem.endswith(("differences", "token_perplexity"))
        )
        shutil.copyfile(image, PAGE.parent / "figures" / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
