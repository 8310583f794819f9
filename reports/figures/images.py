"""Renders figures to SVG, PNG and PDF files without a browser or a network, in worker processes.

While the worker processes draw, the main process builds the page. The module also bundles the script that draws
interactive figures on the page.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from sbeval.errors import UserError
from sbeval.keeping.writing import whole_file
from sbeval.reports.figures import image_process
from sbeval.reports.figures.theme import LIGHT, vega_config
from sbeval.reports.read.fields import unique_name

VEGA_LITE = "6.4"
_MOST_PROCESSES = 4
_WORTH_A_PROCESS = 8
"""Another worker process is started only if every worker has this many figures to draw.

Starting a process takes longer than drawing a figure.
"""
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"
_END = "\n//end\n"
_PANIC = "Failed to "
"""First words of the drawing library's message for a panic. If memory runs out, it prints another message or none."""
_FONT = "Liberation Sans, Arial, sans-serif"
IMAGE_CONFIG = vega_config(LIGHT, font=_FONT) | {"background": LIGHT["paper"], "aria": False}
"""Configuration of Vega-Lite for figures as images: light colours, and a font of the machines that draw them."""


class ImageWriter:
    """Context manager that renders figures in worker processes, at most one for each CPU core and at most four.

    Args:
        folder: folder for the image files; it must exist.
        formats: extensions of the files to write. The SVG text of every figure is rendered even if "svg" is absent.
    """

    def __init__(self, folder: Path, formats: Iterable[str] = ("png", "svg", "pdf")) -> None:
        self._folder = folder
        self._formats = tuple(formats)
        self._scratch = tempfile.TemporaryDirectory()
        self._svgs: dict[str, Path] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._sent_jobs: list[int] = []

    def __enter__(self) -> Self:
        """Returns the writer. No worker process is started before the first figure."""
        return self

    def publish(
        self, spec: Mapping[str, Any], stem: str, fit: tuple[float, float] | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """Sends a figure to a worker process, and does not wait for its images.

        Args:
            spec: Vega-Lite specification.
            stem: wanted file name without extension; if another figure has it, a number is appended.
            fit: for an image in print, the width of the whole figure in pixels and its width on paper in points.

        Returns:
            The file name without extension, and the paths of the image files relative to the page.
        """
        name = unique_name(stem, self._svgs, "{}-{}")
        files = [f"{name}.{kind}" for kind in self._formats]
        self._svgs[name] = svg = Path(self._folder if "svg" in self._formats else self._scratch.name, f"{name}.svg")
        description = Path(self._scratch.name, f"{name}.json")
        description.write_text(json.dumps(_without_interaction(spec), ensure_ascii=False), encoding="utf-8")
        job = {
            "spec": str(description),
            "config": IMAGE_CONFIG,
            "version": VEGA_LITE,
            "svg": str(svg),
            "fit": fit,
            "images": [str(self._folder / file) for file in files if not file.endswith(".svg")],
        }
        fewest_jobs = min(self._sent_jobs, default=_WORTH_A_PROCESS)
        if fewest_jobs >= _WORTH_A_PROCESS and len(self._sent_jobs) < _most_processes():
            self._start()
        chosen = self._sent_jobs.index(min(self._sent_jobs))
        self._sent_jobs[chosen] += 1
        pipe = self._processes[chosen].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # if the worker died, `svgs` raises an error
            pipe.write(json.dumps(job) + "\n")
            pipe.flush()
        return name, tuple(f"{self._folder.name}/{file}" for file in files)

    def _start(self) -> None:
        with Path(self._scratch.name, "stderr").open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", image_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,  # if memory runs out, the drawing library prints pages
                text=True,
                encoding="utf-8",
                process_group=0,  # Ctrl-C reaches only the main process, which ends the workers
            )
        self._processes.append(process)
        self._sent_jobs.append(0)

    def svgs(self) -> dict[str, str]:
        """Waits for all images; returns file name without extension to SVG text.

        Raises:
            UserError: a worker process was killed by a signal, probably because memory ran out.
            RuntimeError: an image could not be drawn; the message contains the error of the drawing library.
        """
        for process, sent_jobs in zip(self._processes, self._sent_jobs, strict=True):
            answers = process.communicate()[0].splitlines()
            errors = [json.loads(answer) for answer in answers]
            failures = [error for error in errors if error]
            if len(answers) < sent_jobs:
                stderr_lines = Path(self._scratch.name, "stderr").read_text(errors="replace").splitlines()
                first_panic = next((line for line in stderr_lines if line.startswith(_PANIC)), None)
                if process.returncode < 0 and first_panic is None:
                    raise UserError(
                        f"A process that draws figures was ended by signal {-process.returncode}, probably because "
                        "memory ran out: raise its limit (ulimit -v) or end other programs, and run again."
                    )
                reason = first_panic or " ".join(stderr_lines[-1:])
                failures.append(f"an image process ended with exit code {process.returncode}: {reason}")
            if failures:
                raise RuntimeError(f"a figure could not be drawn: {failures[0]}")
        self._sent_jobs = [0] * len(self._processes)
        return {stem: path.read_text(encoding="utf-8") for stem, path in self._svgs.items()}

    def __exit__(self, *_: object) -> None:
        """Kills worker processes that still run, and removes their temporary files."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self._scratch.cleanup()


def _most_processes() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_PROCESSES, cores)


def _without_interaction(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the parts that only react to the mouse: invisible hover targets, tooltips and the enlarged point."""
    still = dict(spec)
    for parts in ("concat", "vconcat", "layer"):
        if parts in spec:
            drawn = [part for part in spec[parts] if parts != "layer" or "params" not in part]
            still[parts] = [_without_interaction(part) for part in drawn]
    if "encoding" in spec:
        still["encoding"] = {name: channel for name, channel in spec["encoding"].items() if name != "tooltip"}
        if "condition" in spec["encoding"].get("size", {}):
            still["encoding"]["size"] = {"value": spec["encoding"]["size"]["value"]}
    return still


@lru_cache(maxsize=1)
def javascript() -> str:
    """Returns Vega, Vega-Lite and vega-embed bundled as one script, which the page embeds.

    Bundling takes seconds, so the bundle is cached in the user's cache folder.
    """
    import vl_convert  # slow to import, and needed only if no bundle is cached

    name = f"vega-{VEGA_LITE}-vl-convert-{version('vl-convert-python')}.js"
    cache = _cache_folder() / "sbeval" / name
    with contextlib.suppress(OSError, UnicodeError):
        text = cache.read_text(encoding="utf-8")
        if text.endswith(_END):
            return text
    text = str(vl_convert.javascript_bundle(_GLOBALS, vl_version=VEGA_LITE)) + _END
    with contextlib.suppress(UserError), whole_file(cache, "the page's script") as part:
        part.write_text(text, encoding="utf-8")
    return text


def _cache_folder() -> Path:
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.devnull)  # a user without a home folder has no cache


def script_json(value: object) -> str:
    """Returns a value as JSON that is safe inside a `<script>` element, whatever strings the value contains."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
