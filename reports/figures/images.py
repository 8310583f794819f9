"""Still images of figures: SVG, PNG and PDF, without a browser or a network, drawn beside the work on the page."""

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
"""Figures that a process is asked for before another one is started: starting takes longer than drawing one."""
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"
_END = "\n//end\n"
_FAILS = "Failed to "
"""How the library's own panics begin; where memory ends it says something else, or nothing."""
IMAGE_FONT = "Liberation Sans, Arial, sans-serif"


class ImageWriter:
    """Draws figures in processes of its own, at most as many as there are cores; used as a context.

    Files of the formats go to a folder that exists. Every figure has an SVG text, asked for as a file or not.
    """

    def __init__(self, folder: Path, formats: Iterable[str] = ("png", "svg", "pdf")) -> None:
        self._folder = folder
        self._formats = tuple(formats)
        self._scratch = tempfile.TemporaryDirectory()
        self._svgs: dict[str, Path] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._asked: list[int] = []

    def __enter__(self) -> Self:
        """Begins."""
        return self

    def publish(
        self, spec: Mapping[str, Any], stem: str, fit: tuple[float, float] | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """Has a figure drawn under a name of its own; returns that name, and the files' paths beside the page.

        `fit` is for print: the width of the whole figure in pixels, and how many points that are on paper.
        """
        name = unique_name(stem, self._svgs, "{}-{}")
        files = [f"{name}.{kind}" for kind in self._formats]
        self._svgs[name] = svg = Path(self._folder if "svg" in self._formats else self._scratch.name, f"{name}.svg")
        description = Path(self._scratch.name, f"{name}.json")
        description.write_text(json.dumps(_without_pointer(spec), ensure_ascii=False), encoding="utf-8")
        job = {
            "spec": str(description),
            "config": vega_config(LIGHT, font=IMAGE_FONT) | {"background": LIGHT["paper"], "aria": False},
            "version": VEGA_LITE,
            "svg": str(svg),
            "fit": fit,
            "images": [str(self._folder / file) for file in files if not file.endswith(".svg")],
        }
        if min(self._asked, default=_WORTH_A_PROCESS) >= _WORTH_A_PROCESS and len(self._asked) < _most_processes():
            self._start()
        chosen = self._asked.index(min(self._asked))
        self._asked[chosen] += 1
        pipe = self._processes[chosen].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # reported when its answers are read
            pipe.write(json.dumps(job) + "\n")
            pipe.flush()
        return name, tuple(f"{self._folder.name}/{file}" for file in files)

    def _start(self) -> None:
        with Path(self._scratch.name, "said").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-P", image_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,  # its library prints pages where memory ends
                text=True,
                encoding="utf-8",
                process_group=0,  # Ctrl-C reaches this process, which ends them
            )
        self._processes.append(process)
        self._asked.append(0)

    def svgs(self) -> dict[str, str]:
        """Waits for all images and returns their SVG texts by stem.

        Raises:
            UserError: a process that draws was ended, as one without memory is.
            RuntimeError: an image could not be drawn; the message holds what the library said.
        """
        for process, asked in zip(self._processes, self._asked, strict=True):
            answers = process.communicate()[0].splitlines()
            failures = [words for answer in answers if (words := json.loads(answer))]
            if len(answers) < asked:
                said = Path(self._scratch.name, "said").read_text(errors="replace").splitlines()
                first_panic = next((line for line in said if line.startswith(_FAILS)), None)
                if process.returncode < 0 and first_panic is None:
                    raise UserError(
                        f"Expected figures to be drawn, found that a process ended with signal {-process.returncode}, "
                        "as one without memory does: raise its limit (ulimit -v), or end other programs, and run again."
                    )
                reason = first_panic or " ".join(said[-1:])
                failures.append(f"an image process ended with exit code {process.returncode}: {reason}")
            if failures:
                raise RuntimeError(f"a figure could not be drawn: {failures[0]}")
        self._asked = [0] * len(self._processes)
        return {stem: path.read_text(encoding="utf-8") for stem, path in self._svgs.items()}

    def __exit__(self, *_: object) -> None:
        """Ends the processes and removes what they read."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self._scratch.cleanup()


def _most_processes() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_PROCESSES, cores)


def _without_pointer(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what only answers a pointer: the invisible targets, tooltips and the point under it."""
    still = dict(spec)
    for parts in ("concat", "vconcat", "layer"):
        if parts in spec:
            still[parts] = [_without_pointer(part) for part in spec[parts] if parts != "layer" or "params" not in part]
    if "encoding" in spec:
        still["encoding"] = {name: channel for name, channel in spec["encoding"].items() if name != "tooltip"}
        if "condition" in spec["encoding"].get("size", {}):
            still["encoding"]["size"] = {"value": spec["encoding"]["size"]["value"]}
    return still


@lru_cache(maxsize=1)
def javascript() -> str:
    """Returns Vega, Vega-Lite and vega-embed as one script to be embedded in the page.

    Bundling takes seconds, so the result is kept in the user's cache folder for the next report.
    """
    import vl_convert  # a process for images alone imports it

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
    return Path(os.devnull)  # a user without a home keeps nothing


def script_json(value: object) -> str:
    """Writes JSON that is safe inside a `<script>` element, whatever text it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
