"""Results and samples files of lm-eval, damaged and read into a report.

The numbers are the rows of the tidy table, the sums by document and the scores of samples. They are named as changed
where a note says so, or where the number shown is the one that the damaged file holds: a file with other numbers is
another result, and what it says is shown. A value that is no number any more, and a file that is no longer whole, may
only go with a note.
"""

import collections
import datetime
import functools
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from sbeval.reports import load_results
from sbeval.reports.analyse.selection import pool_seeds
from sbeval.reports.build import assemble
from sbeval.reports.kinds.position_sums import BINS, POSITION_SUMS
from sbeval.reports.kinds.spans import HEADS
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES
from sbeval.reports.write.exports import write_tables
from sbeval.reports.write.html import write_page
from sbeval.results.records import TaskRecord
from tests.fuzz.mutations import (
    ABSENT,
    Change,
    changed_bytes,
    changed_tree,
    damage,
    differences,
    put_in_place_of,
    same_kind,
)
from tests.fuzz.outcomes import Silent
from tests.reports import result_files

LENGTHS = [256, 1024, 4096]
SPAN = {"alias": "sb_span", "attention_span@0001024,none": [[0, 0, 3.0, 9.0, 20.0, 0.1], [0, 1, None, None, None, 0.5]]}
NAMES = ["results", "samples"]
Numbers = tuple[dict[Any, Any], dict[Any, Any]]


@functools.cache
def undamaged() -> tuple[Path, Numbers, frozenset[str]]:
    """Writes two runs once, and reads them."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "results"
    for scheme in ("stickbreaking", "rope"):
        curve = result_files.CURVES[scheme][:3]
        tasks = [
            result_files.perplexity_task("stream", curve, lengths=LENGTHS, documents=24),
            result_files.perplexity_task("fixed_target", curve, lengths=LENGTHS, documents=24),
            result_files.position_task(result_files.CURVES[scheme], longest=4096),
            result_files.ruler_task("sb_niah_single_1", 2000, lengths=LENGTHS, depths=4, repeats=2),
            result_files.ordinary_task("hellaswag", "acc", 0.5, samples=10),
            ("sb_span", SPAN, TaskRecord(family="span", protocol="span", lengths=LENGTHS).to_json(), []),
        ]
        result_files.write_run(folder / scheme, result_files.model_record(scheme), tasks)
    numbers, notes = _read(folder)
    return folder, numbers, frozenset(notes)


def _read(folder: Path) -> tuple[Numbers, set[str]]:
    """Returns the numbers by what they are of: those of results files, and those of samples files; and the notes."""
    results = load_results([folder])
    rows: dict[Any, Any] = {}
    for row in results.measurements.to_dict("records"):
        run = os.path.basename(os.path.dirname(row["results_file"]))
        key = (run, *(str(row[name]) for name in ("task", "metric", "filter", "context_length_tokens")))
        rows[key] = [row[name] for name in ("value", "ci95_low", "ci95_high", "stderr", "tokens", "clusters")]
    samples: dict[Any, Any] = {}
    for key, sums in results[DOCUMENT_SUMS].items():
        samples[key] = [sums.lengths, sums.clusters, sums.nll_nats.tolist(), sums.tokens.tolist()]
    for key, scores in results[SAMPLE_SCORES].items():
        samples["scores", *key] = [scores.scores, scores.depths_percent]
    for key, places in results[POSITION_SUMS].items():
        sums_by_bin = [
            [place, name, *values.tolist()] for place, of in places.sums.items() for name, values in sorted(of.items())
        ]
        samples["positions", *key] = [sums_by_bin, places.obstacle]
    rows["positions"] = results[BINS].to_csv()
    rows["spans"] = results[HEADS].to_csv()
    return (rows, samples), {note.reason for note in results.notes}


def fuzz(what: str, rng: Random, folder: Path) -> str:
    source, before, known = undamaged()
    copy = shutil.copytree(source, folder / "results")
    changes: list[Change] | None = None
    file = next((copy / "rope").glob("results_*.json"))
    if what == "results":
        changes = damage(file, rng)
    else:
        file = rng.choice(sorted((copy / "rope").glob("samples_*.jsonl")))
        changes = _damage_samples(file, rng)
    (rows, samples), notes = _read(copy)
    if rng.random() < 0.03:
        _write(copy, folder / "page")
    if _same((rows, samples), before):
        return "equal"
    if notes - known:
        return "named"
    if what == "samples" and not os.path.lexists(file):
        return "named"  # a run without samples has no paired differences, and shows none
    original, content = (_content(path) for path in (source / file.relative_to(copy), file))
    if content is None or (isinstance(content, list) and len(content) != len(original)):
        raise Silent(f"{file.name} is no longer whole, and no note says so")
    if not changes:
        changes = list(differences(original, content))
    if what == "results":
        _check_rows(before[0], rows, content, changes)
    elif len(changes) == 1 and _was_number(changes[0]) and (_is_summed(changes[0]) or not same_kind(*changes[0][1:])):
        raise Silent(f"{changes[0]}")
    return "named"


def _content(file: Path) -> Any:
    """Returns what a results file or the lines of a samples file hold, None for what is no JSON."""
    try:
        if not file.is_file():
            return None
        text = file.read_bytes()
        return json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    except (ValueError, RecursionError):
        return None


def _write(results: Path, folder: Path) -> None:
    """Writes a report without images, which processes of their own draw."""
    (folder / "latex").mkdir(parents=True)
    loaded = load_results([results])
    images: dict[str, str] = collections.defaultdict(lambda: "<svg/>")
    report = assemble(pool_seeds(loaded, None), baseline=None, publish=lambda _, stem: (stem, ()), folder=folder)
    write_tables(loaded, report, folder, title="x")
    page = write_page(report, title="x", built=datetime.datetime.now(tz=datetime.UTC), images=images)
    (folder / "index.html").write_text(page, encoding="utf-8")


def _damage_samples(file: Path, rng: Random) -> list[Change] | None:
    lines = file.read_bytes().splitlines(True)
    place, draw = rng.randrange(len(lines)), rng.random()
    changes = None
    if draw < 0.6:
        tree, changes = changed_tree(json.loads(lines[place]), rng)
        lines[place] = json.dumps(tree).encode() + b"\n"
    elif draw < 0.8:
        lines[place] = changed_bytes(lines[place], rng)
    elif draw < 0.9:
        lines = rng.choice([lines[:place], lines + lines, lines[place:], [], [b"\n"] * 3])
    else:
        put_in_place_of(file, rng)
        return None
    file.write_bytes(b"".join(lines))
    return changes


def _check_rows(before: dict[Any, Any], after: dict[Any, Any], content: Any, changes: list[Change]) -> None:
    """Raises `Silent` where a row is gone or another, and neither is what the damaged file holds."""
    written = set(_numbers(content))
    for key, values in after.items():
        if isinstance(values, list) and not _same(values, before.get(key)):
            for value in values:
                if not math.isnan(value) and value not in written:
                    raise Silent(f"{key}: {values} with {changes}")
    for key in before.keys() - after.keys():
        task, metric = key[1:3]
        for change in changes:
            here = change.path[:2] == ("results", task) and str(change.path[-1]).startswith(metric)
            if here and _was_number(change) and change.new not in (ABSENT, None):
                raise Silent(f"{key} is gone with {change} and no note")


def _was_number(change: Change) -> bool:
    return isinstance(change.old, int | float) and not isinstance(change.old, bool)


def _is_summed(change: Change) -> bool:
    """Whether a sample's number enters one of the results file, which tells its damage."""
    return ABSENT != change.new != change.old and str(change.path[0]).startswith(
        ("nll@", "position_nll", "score@", "acc")
    )


def _numbers(value: Any) -> Any:
    if isinstance(value, int | float):
        yield float(value) if abs(value) < 1e100 else math.nan
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _numbers(one)


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)
