"""Whatever text results and samples hold, every file of a report parses and none holds a character that acts."""

import base64
import csv
import functools
import json
import random
import re
import sys
import unicodedata
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from experiment_files import mqrar_task, span_task
from result_files import CURVES, model_record, ordinary_task, perplexity_task, position_task, ruler_task, write_run

from sbeval.errors import unseen, visible
from sbeval.foreign_files import parse_visible_json
from sbeval.reports import build_report, compare, load_results
from sbeval.reports.read.samples import DOCUMENT_SUMS
from sbeval.reports.write.exports import csv_text
from tests.marks import exhaustive

FORMULAS = ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20"]
NAMES = re.compile(r"lib/module_|file_|sb_|acc_task|stdlib")
"""Beginnings of names of documents, tasks and texts: one that stands in several places is the same in all."""
FREE = (
    *("name", "gpu", "kernels", "format", "backend", "command", "sentence", "dtype", "corpus_detail", "separator"),
    *("git_hash", "model_source", "model_name", "transformers_version", "pretrained", "target", "arg_0", "references"),
    *("torch", "triton", "sbeval", "filtered_resps", "unknown", "N/A"),
)


@functools.cache
def _by_category() -> dict[str, list[str]]:
    categories: dict[str, list[str]] = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        categories[unicodedata.category(chr(code))].append(chr(code))
    return dict(categories)


def any_text(draw: random.Random, letters: int = 12) -> str:
    """Letters of every category alike, so that most are none that one sees, or of a script that turns."""
    special = [
        *FORMULAS,
        "\x1b",
        "\0",
        "\x9b",
        "\u202e",
        "\u2067",
        "\u200f",
        "\ud800",
        "\udfff",
        "\u2028",
        "\ufffe",
        "\uffff",
        ";",
        '"',
    ]
    pools = [*_by_category().values(), special, special]
    return "".join(draw.choice(draw.choice(pools)) for _ in range(letters))


def acting(text: str) -> list[str]:
    return sorted({f"{letter!r}" for letter in text if letter not in "\n\t" and unseen(letter)})


def of_a_file(text: str) -> str:
    return text.replace("/", "").replace("\0", "").encode("utf-8", "ignore").decode()


class AnyTexts:
    """Draws a text in place of each free one; a name becomes the same text wherever it stands."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.names: dict[str, str] = {}

    def name(self, name: str) -> str:
        if NAMES.match(name) and name not in self.names:
            text = any_text(self.draw)
            # lm-eval writes a samples file of a task's name, which the file system has to take
            self.names[name] = text if name.endswith(".py") or name == "stdlib" else of_a_file(text)
        return self.names.get(name, name)

    def instead_of(self, value: Any, field: str = "") -> Any:
        if isinstance(value, dict):
            return {self.name(key): self.instead_of(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self.instead_of(item, field) for item in value]
        if isinstance(value, str):
            return any_text(self.draw) if field in FREE else self.name(value)
        return value

    def file_name(self, name: str) -> str:
        """A name that a file system takes, with each task's name in it as lm-eval writes it."""
        for old, new in self.names.items():
            name = name.replace(f"samples_{old}_", f"samples_{new}_")
        return of_a_file(name)


def write_any_texts(folder: Path, texts: AnyTexts) -> None:
    for attention in ("stickbreaking", "rope"):
        tasks = [
            perplexity_task("fixed_target", CURVES[attention], documents=24),
            position_task(CURVES[attention]),
            ruler_task("sb_ruler_vt", 4000),
            ordinary_task("acc_task", "acc", 0.5, samples=24),
            mqrar_task(64),
            span_task(attention),
        ]
        for _, metrics, _, samples in tasks:
            metrics["unknown"] = "text"
            for sample in samples:
                lengths = sample["doc"].get("lengths", [0]) if isinstance(sample.get("doc"), dict) else [0]
                sample["arguments"] = {f"gen_args_{place}": {"arg_0": "", "arg_1": {}} for place in range(len(lengths))}
                sample["filtered_resps"] = [""] * len(lengths)
        model = model_record(attention, self_test={"sentence": "", "sound": False}, command="", backend="")
        write_run(folder / "plain", model, tasks, extra={"unknown": ""})
        place = folder / "results" / texts.file_name(f"{attention}{any_text(texts.draw)}")
        place.mkdir(parents=True)
        for file in sorted((folder / "plain").iterdir()):
            lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            drawn = [json.dumps(texts.instead_of(json.loads(line))) for line in lines]
            (place / texts.file_name(file.name)).write_text("\n".join(drawn) + "\n")
            file.unlink()


class Page(HTMLParser):
    """The page's texts and attributes, its JSON, and the images in it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.images: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.inside = "json" if given.get("type") == "application/json" else tag
        for name, value in attrs:
            start = "data:image/svg+xml;base64,"
            if name == "src" and value and value.startswith(start):
                self.images.append(base64.b64decode(value.removeprefix(start)).decode())
            self.texts.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "json":
            self.scripts.append(data)
        elif self.inside != "script":
            self.texts.append(data)


@pytest.mark.parametrize("seed", exhaustive(0, 1, 2, 3))
def test_any_text_gives_files_that_parse_without_a_character_that_acts(seed: int, tmp_path: Path) -> None:
    write_any_texts(tmp_path, AnyTexts(seed))
    formats = ("svg", "png", "pdf") if seed == 0 else ("svg",)
    paper = tmp_path / "paper" if seed == 0 else None
    title = any_text(random.Random(seed))
    page = build_report([tmp_path / "results"], tmp_path / "report", image_formats=formats, title=title, paper=paper)
    (parsed := Page()).feed(page.read_text(encoding="utf-8"))
    assert len(parsed.images) > 5
    texts = {"page": "".join(parsed.texts), "comparison": ""}
    for place, script in enumerate(parsed.scripts):
        texts[f"script {place}"] = "".join(strings(json.loads(script)))
    files = [*page.parent.rglob("*"), *(tmp_path / "paper").rglob("*")]
    texts |= {file.name: file.read_text("utf-8") for file in files if file.suffix in (".md", ".csv", ".tex", ".svg")}
    texts |= {f"image {place}": image for place, image in enumerate(parsed.images)}
    for name, text in texts.items():
        if name.endswith(".svg") or name.startswith("image"):
            ElementTree.fromstring(text)
    texts["results.parquet"] = "".join(strings(pd.read_parquet(page.with_name("results.parquet")).to_dict("records")))
    labels = [model.label for model in load_results([tmp_path / "results"]).models]
    texts["comparison"] = compare(*labels, paths=[tmp_path / "results"]).text()
    assert {name: acting(text) for name, text in texts.items() if acting(text)} == {}
    for name in ("results.csv", "numbers.csv"):
        cells = [cell for row in csv.reader(texts[name].splitlines()) for cell in row]
        numbers = re.compile(r"-?[\d.]+(e-?\d+)?")
        formulas = [part for cell in cells if not numbers.fullmatch(cell) for part in re.split('[,;"]', cell)]
        assert [part for part in formulas if part.startswith(tuple(FORMULAS))] == []


def strings(value: Any) -> list[str]:
    """Every text of a parsed file, keys included."""
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_documents_that_differ_in_a_character_that_acts_stay_apart(tmp_path: Path) -> None:
    task = perplexity_task("fixed_target", CURVES["rope"], documents=24)
    names = [f"a{letter}" for letter in "\x01\x02\x9b\u202e\u202d\ufffe\ud800\udfff"] + [
        f"{place}" for place in range(16)
    ]
    renamed = {f"lib/module_{place:02d}.py": name for place, name in enumerate(names)}
    (samples,) = [file for file in (write_run(tmp_path, model_record("rope"), [task])).parent.glob("*.jsonl")]
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line in lines:
        line |= {key: [[renamed[row[0]], *row[1:]] for row in line[key]] for key in line if key.startswith("nll@")}
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = load_results([tmp_path])
    (sums,) = results[DOCUMENT_SUMS].values()
    assert sums.clusters == sorted(map(visible, names))


@pytest.mark.parametrize("escaped", [True, False])
def test_texts_of_json_are_cleaned_where_they_are_read_and_others_stay(escaped: bool) -> None:
    value = {"a\x1b": ["\x7f\x85", {"b": "\ud800"}], "plain": "\\x1b \u00e9 \U0001f468\u200d\U0001f469\n\t", "n": 1.5}
    text = json.dumps(value, ensure_ascii=escaped)
    read = parse_visible_json(text.encode("utf-8", "surrogatepass"))
    shown = {r"a\x1b": [r"\x7f\x85", {"b": r"\ud800"}], "plain": value["plain"], "n": 1.5}
    assert read == parse_visible_json(text) == shown


@pytest.mark.parametrize("sign", FORMULAS)
@pytest.mark.parametrize("before", ["", " ", "a,", "a;", 'a"', "a'", "a, ", "a\n,"])
def test_no_cell_of_a_csv_file_begins_a_formula(sign: str, before: str) -> None:
    shown = csv_text(f"{before}{sign}1")
    parts = [part.strip() for part in re.split('[,;"]', shown)]
    assert [part for part in parts if part.startswith(tuple(FORMULAS))] == []
    assert not set(shown) & set("\t\r\n")
