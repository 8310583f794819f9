"""Packs the results of `evaluate` as a small file.

    python -m research.real_models.archive real/evaluated docs/results/smollm2/results.tar.xz

Prompts are cut to their first 60 characters: the tasks make them again from the recorded settings. The archive holds
`results/`, `estimates/`, `jobs.jsonl`, and the logs of trainings.
"""

import argparse
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHOWN_CHARACTERS = 60


def shortened(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a sample whose prompts are cut."""
    requests = sample.get("arguments")
    for arguments in requests.values() if isinstance(requests, dict) else ():
        prompt = arguments.get("arg_0")
        if isinstance(prompt, str) and len(prompt) > SHOWN_CHARACTERS + 40:  # keys of tokens stay whole
            arguments["arg_0"] = prompt[:SHOWN_CHARACTERS] + "…"
    return sample


def members(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files of an archive, by their names in it."""
    chosen = [*folder.glob("results/**/*.json*"), *folder.glob("estimates/*.json"), *folder.glob("logs/extended_*.log")]
    for file in sorted(each for each in (*chosen, folder / "jobs.jsonl") if each.is_file()):
        content = file.read_bytes()
        if file.name.startswith("samples_"):
            samples = [shortened(json.loads(line)) for line in content.decode().splitlines()]
            content = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples).encode()
        yield file.relative_to(folder).as_posix(), content


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that evaluate wrote")
    parser.add_argument("archive", type=Path, help="its name, which ends in .tar.xz")
    options = parser.parse_args(arguments)
    with tarfile.open(options.archive, "w:xz") as archive:
        for name, content in members(options.folder):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    print(f"{options.archive}: {options.archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
