"""The figures of extrapolation/README.md, drawn by `sbeval report`'s own code from the result files."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from research.paper_experiments.attention_picture import write_picture
from sbeval.reports import build_report

SCHEMES = (
    "stickbreaking",
    "rope",
    "rope_dynamic1",
    "rope_dynamic4",
    "nope",
    "alibi",
    "fire",
    "forgetting",
    "rope_window_1024",
)
EXTENSION = ("stickbreaking", "stickbreaking_extended", "rope_dynamic4", "rope_extended")
REST = {
    "windows": (
        ("stickbreaking", "rope", "rope_window_256", "rope_window_512", "rope_window_1024"),
        "-attention_window",
    ),
    "training-length": (("stickbreaking", "rope", "rope_4x", "rope_4x_dynamic"), "-training_length"),
    "remainder": (("stickbreaking", "stickbreaking_remainder", "stickbreaking_remainder_norm"), ""),
}
"""Figures of the schemes that would crowd the first: which they show, and what the report splits them by."""
NEEDLES = ("stickbreaking", "stickbreaking_extended", "rope", "rope_extended")
LABELS = {
    "stickbreaking": "stick-breaking",
    "stickbreaking_extended": "stick-breaking, extended",
    "rope_extended": "RoPE dynamic:4, extended",
    "rope": "RoPE",
    "rope_dynamic1": "RoPE dynamic:1",
    "rope_dynamic4": "RoPE dynamic:4",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "fire": "FIRE",
    "forgetting": "FoX",
    "rope_window_256": "RoPE, window 256",
    "rope_window_512": "RoPE, window 512",
    "rope_window_1024": "RoPE, window 1K",
    "rope_4x": "RoPE, trained at 4K",
    "rope_4x_dynamic": "RoPE dynamic:4, trained at 4K",
    "stickbreaking_remainder": "with remainder bias",
    "stickbreaking_remainder_norm": "with remainder bias, head norm",
}
NAMES_BESIDE_ROPE = {
    "rope_dynamic1": "scheme_rope (dynamic RoPE x1)",
    "rope_dynamic4": "scheme_rope (dynamic RoPE x4)",
}
"""One checkpoint evaluated several ways is told apart in its name; one way alone is not."""


def draw(folder: Path, target: Path) -> None:
    """Draws all figures of an unpacked archive into `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name, schemes in (("schemes", SCHEMES), ("extension", EXTENSION)):
        for protocol in ("stream", "fixed_target"):
            found = _report(folder, schemes, f"sb_stdlib_{protocol}")
            keep(found, f"stdlib*-{protocol}*-nll", target / f"{name}-{protocol}")
    for name, (schemes, split) in REST.items():
        found = _report(folder, schemes, "sb_stdlib_stream")
        keep(found, f"stdlib*-stream{split}*-nll", target / f"{name}-stream")
    for task in ("sb_niah_single_1", "sb_niah_multikey_1"):
        found = _report(folder, NEEDLES, task)
        keep(found, f"needles-{task.removeprefix('sb_')}", target / task.removeprefix("sb_"))
    for attention in ("stickbreaking", "rope"):
        weights = folder / "mqrar" / f"{attention}_16.npz"
        if weights.is_file():
            title = f"Attention on a sequence of 16 pairs, {LABELS[attention]}"
            write_picture(weights, target / f"attention-{attention}-16-pairs.png", title=title)


def _report(folder: Path, schemes: Sequence[str], task: str) -> Path:
    files = {
        scheme: [
            file
            for file in sorted(folder.glob(f"results/scheme_{scheme}/*/results_*.json"))
            if task in json.loads(file.read_text(encoding="utf-8"))["results"]
        ]
        for scheme in schemes
    }
    there = [scheme for scheme in schemes if files[scheme]]
    names = {scheme: f"scheme_{scheme}" for scheme in there}
    of_rope = [scheme for scheme in there if scheme == "rope" or scheme in NAMES_BESIDE_ROPE]
    for scheme in of_rope:
        names[scheme] = "scheme_rope" if len(of_rope) == 1 else NAMES_BESIDE_ROPE.get(scheme, "scheme_rope")
    labels = {names[scheme]: LABELS[scheme] for scheme in there}
    return report_figures([file for scheme in there for file in files[scheme]], folder, labels)


def report_figures(files: Sequence[Path], scratch: Path, labels: Mapping[str, str]) -> Path:
    """Returns the folder of the figures that `sbeval report` draws from these results files."""
    out = Path(tempfile.mkdtemp(dir=scratch))
    if files:
        build_report(list(files), out, labels=labels, image_formats=("png", "svg"))
    return out / "figures"


def keep(figures: Path, pattern: str, target: Path) -> None:
    """Keeps the figure with the most lines: the one over all schemes, where there are several."""
    images = sorted(figures.glob(f"{pattern}.svg"), key=lambda file: file.stat().st_size)
    if images:
        for suffix in (".svg", ".png"):
            shutil.copy(images[-1].with_suffix(suffix), target.with_suffix(suffix))
