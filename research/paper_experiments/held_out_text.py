"""Writes the standard library of this interpreter as one file of documents, to evaluate on another machine.

    python -m research.paper_experiments.held_out_text stdlib.jsonl.gz

The order is that of `sb_stdlib_*`, so `--metadata '{"data_path": "stdlib.jsonl.gz"}'` reads the same text there.
"""

import gzip
import json
import sys
from pathlib import Path

from sbeval.corpora.sources import stdlib_corpus


def main(file: Path) -> None:
    """Writes the file."""
    lines = [json.dumps({"text": document.text, "name": document.name}) for document in stdlib_corpus().documents()]
    with gzip.GzipFile(file, "wb", mtime=0) as packed:
        packed.write("".join(line + "\n" for line in lines).encode())
    print(f"{file}: {len(lines)} documents, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
