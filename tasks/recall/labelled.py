"""Loads labelled texts for many-shot classification, from the hub or from local files in the same layouts.

The datasets and their fields are those of HELMET (Yen et al., arXiv 2410.02694). Three of them consist of loading
scripts, which `datasets` no longer runs. For these the module reads Parquet files into which the hub converted them.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.documents import MARK
from sbeval.errors import UserError, first_line
from sbeval.hub_names import local_path
from sbeval.keeping.content import cached_by_content
from sbeval.tasks.draws import seeded_order
from sbeval.tasks.recall.options import ManyShotOptions
from sbeval.tasks.ruler.texts import Missing, MissingCorpus, load_from_hub

HELD_OUT = 10
"""If a dataset has no split for questions, one text in `HELD_OUT` becomes a question and is not used as an example."""


class HubLabels(NamedTuple):
    """Where a dataset on the hub holds labelled texts.

    Attributes:
        key: the option that names a local copy.
        path: the dataset's id on the hub.
        config: the dataset's configuration.
        converted: whether to read the Parquet files into which the hub converted the dataset.
        label_field: column of the labels; the texts are in the column `text`.
        question_split: split of the questions, None if there is only `train`.
    """

    key: str
    path: str
    config: str | None = None
    converted: bool = True
    label_field: str = "label"
    question_split: str | None = "test"


SOURCES: dict[str, HubLabels] = {
    "trec": HubLabels("trec", "CogComp/trec", label_field="coarse_label"),
    "trec_fine": HubLabels("trec", "CogComp/trec", label_field="fine_label"),
    "banking77": HubLabels("banking77", "PolyAI/banking77"),
    "clinc150": HubLabels("clinc150", "clinc/clinc_oos", "plus", False, "intent", "validation"),
    "nlu": HubLabels("nlu", "xingkunliuxtracta/nlu_evaluation_data", question_split=None),
    "file": HubLabels("examples_file", "a path"),
}


class LabelledTexts(NamedTuple):
    """Texts with labels, divided into shots (examples in prompts) and questions; every label has at least one shot.

    Attributes:
        shots: distinct texts that prompts show with their labels.
        shot_labels: labels of the shots, int64 [shots], from 0 to labels - 1.
        questions: texts whose labels the model has to predict; none of them is a shot.
        question_labels: labels of the questions, int64 [questions].
        labels: number of different labels.
        sha256: hash of texts and labels.
        source: a local path or the dataset's id.
    """

    shots: list[str]
    shot_labels: NDArray[np.int64]
    questions: list[str]
    question_labels: NDArray[np.int64]
    labels: int
    sha256: str
    source: str


def task_labelled(options: ManyShotOptions) -> LabelledTexts:
    """Returns the labelled texts that a task's options name: a file, a folder of files, or a dataset on the hub.

    Files are .jsonl, .json, .csv or .parquet; a folder holds one file for `train` and one for `test`.

    Raises:
        UserError: there is no such file or dataset, or it has another layout.
    """
    return load_labelled(options.examples, getattr(options, SOURCES[options.examples].key))


@cached_by_content(8, argument=1)
def load_labelled(examples: str, path: str | None) -> LabelledTexts:
    """Reads labelled texts from a local path or, if `path` is None, from the hub; `examples` is a key of `SOURCES`."""
    source = SOURCES[examples]
    splits = _splits(source, path)
    where = path or source.path
    fields = ("text", source.label_field)
    for name, rows in splits.items():
        if not set(fields) <= set(rows.column_names):
            expected = f"Expected the columns {' and '.join(fields)} in {name} of {where}"
            raise UserError(f"{expected}, found {', '.join(rows.column_names)}: rename the columns of the file.")
    question_split = next((name for name in (source.question_split, "test", "validation") if name in splits), None)
    shots, questions = (
        [
            (" ".join(str(text).removeprefix(MARK).split()), label)
            for text, label in zip(*(rows[field] for field in fields), strict=True)
            if text and label is not None
        ]
        for rows in (splits["train"], splits[question_split] if question_split else splits["train"].select([]))
    )
    shots = list(dict(shots).items())
    if question_split is None:
        held_out = set(seeded_order(len(shots), "held out", examples)[: len(shots) // HELD_OUT].tolist())
        questions = [row for number, row in enumerate(shots) if number in held_out]
        shots = [row for number, row in enumerate(shots) if number not in held_out]
    known = sorted({label for _, label in shots}, key=lambda label: (str(type(label)), label))
    shot_texts = {text for text, _ in shots}
    number = {label: i for i, label in enumerate(known)}
    questions = [(text, label) for text, label in questions if label in number and text not in shot_texts]
    if len(known) < 2 or not questions:
        raise UserError(
            f"Expected texts with at least two labels, and further texts as questions, in {where}, found {len(known)} "
            f"labels and {len(questions)} questions: name a file with more rows."
        )
    texts, question_texts = ([text for text, _ in rows] for rows in (shots, questions))
    labels = [np.array([number[label] for _, label in rows], dtype=np.int64) for rows in (shots, questions)]
    digest = hashlib.sha256("\x1e".join([*texts, "\x1d", *question_texts]).encode())
    for array in labels:
        digest.update(array.tobytes())
    return LabelledTexts(texts, labels[0], question_texts, labels[1], len(known), digest.hexdigest(), where)


def _splits(source: HubLabels, path: str | None) -> dict[str, Any]:
    """Returns a mapping from splits, of which one is `train`, to tables; reads a local copy, or the hub without one."""
    if path is None:
        if source.key == "examples_file":
            raise MissingCorpus([Missing(source.key, "PATH", source.path, "none is given")])
        revision = "refs/convert/parquet" if source.converted else None
        return dict(load_from_hub(source.key, "PATH", source.path, source.config, revision=revision))
    return local_splits(path, source.key, "labelled texts")


def local_splits(path: str, key: str, what: str) -> dict[str, Any]:
    """Reads a local file or folder; returns a mapping from splits to tables, of which one is `train`.

    Args:
        path: the file or folder.
        key: the option that names it, for errors.
        what: a name of the data, for errors: "labelled texts".

    Raises:
        UserError: there is no such file, it cannot be read, or it has no split `train`.
    """
    import datasets  # imported late: it takes seconds, and options are read without it

    place = local_path(path)
    kind = {".jsonl": "json"}.get(place.suffix, place.suffix[1:])
    if not place.is_dir() and not (place.is_file() and kind in ("json", "csv", "parquet")):
        expected = f"Expected {what} at {path}"
        remedy = f"name a .jsonl, .json, .csv or .parquet file, or a folder of them, with {key} in --metadata"
        raise UserError(f"{expected}, found {'another kind of file' if place.is_file() else 'nothing'}: {remedy}.")
    try:
        splits = datasets.load_dataset(str(place)) if place.is_dir() else datasets.load_dataset(kind, data_files=path)
    except Exception as error:  # the reader raises many unrelated classes for files it cannot read
        remedy = "write one JSON object on each line"
        raise UserError(f"{path} cannot be read as rows of {what} ({first_line(error)}): {remedy}.") from error
    if "train" not in splits:
        raise UserError(
            f"Expected a file for the split train in {path}, found {', '.join(splits)}: name one file train.jsonl."
        )
    return dict(splits)
