"""Many-shot classification: shots show labels, labels are assigned anew, and a model that reads them is right."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from partial_model import PartialModel
from ruler_problems import KINDS, evaluated, load_task, write_labelled

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetLogprobs, TargetSequence, resolve_sequence
from sbeval.tasks.recall.labelled import SOURCES, load_labelled
from sbeval.tasks.recall.many_shot import LabelTree
from sbeval.tasks.ruler.drafts import Frame, prompt_text
from sbeval.tasks.ruler.texts import MissingCorpus
from sbeval.tasks.user_options import check_options
from tests.marks import exhaustive

SHOT = re.compile(r"(.+) Label: ?(\d+)")


def made(task: Any, index: int, length: int) -> tuple[list[tuple[str, str]], str]:
    """Returns the shots of a prompt and its question."""
    draft = task.generator.draft(index, length)
    prompt = prompt_text(draft, task.sizes.filler(length, Frame()).sizes([index])[index].units, Frame())
    _, *shots, question = prompt.split("\n")
    return [(text, number) for text, _, number in (shot.rpartition(" Label: ") for shot in shots)], question


def kind_of(text: str) -> str:
    return text.removesuffix(" Label:").rsplit(" ", 1)[1]


def options_of(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {"tokenizer": str(folder / kind), "examples_file": str(folder / "labelled.jsonl"), **more}


@pytest.mark.parametrize("kind", KINDS)
def test_shots_come_in_rounds_of_all_labels_each_with_one_number(folder: Path, kind: str) -> None:
    task = load_task("sb_many_shot_file", options_of(folder, kind, context_lengths=[1500, 30_000], num_samples=5))
    maps = []
    for index in range(5):
        short, question = made(task, index, 1500)
        long, same = made(task, index, 30_000)
        assert (question, long[: len(short)]) == (same, short)
        assert len(short) >= 12
        dealt = {kind_of(text): number for text, number in long}
        assert {(kind_of(text), number) for text, number in long} == set(dealt.items())
        assert sorted(dealt.values()) == [str(number) for number in range(10, 22)]
        for first in range(0, len(long) - 12, 12):
            assert len({number for _, number in long[first : first + 12]}) == 12
        texts = Counter(text for text, _ in long)
        assert len(texts) == 216  # nine in ten lines of the file, repeated
        assert max(texts.values()) - min(texts.values()) <= 3
        assert question.removesuffix(" Label:") not in texts
        assert task.generator.draft(index, 1500).references == [dealt[kind_of(question)]]
        maps.append(tuple(sorted(dealt.items())))
    assert len(set(maps)) == 5


class OnShots(PartialModel):
    """Answers with a label's share of the probability after the prompt; `share` defines the right label."""

    def __init__(self, tokenizer: Any, numbers: range) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        behind = [self.ids(f"a Label: {number}")[len(self.ids("a Label:")) :] for number in numbers]
        self.paths = dict(zip(map(str, numbers), map(tuple, behind), strict=True))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def share(self, prompt: str, number: str) -> float:
        return 1.0

    def scores(self, sequence: TargetSequence) -> TargetLogprobs:
        inputs = sequence.inputs_L.tolist()
        cue = self.ids("a Label:")[len(self.ids("a")) :]
        start = next(i for i in range(len(inputs), 0, -1) if inputs[i - len(cue) : i] == cue)
        prompt, read = self.tokenizer.decode(inputs[:start]), tuple(inputs[start:])
        share = {path: self.share(prompt, number) for number, path in self.paths.items()}

        def sum_of(begin: tuple[int, ...]) -> float:
            return sum(value for path, value in share.items() if path[: len(begin)] == begin)

        assert set(sequence.positions_T.tolist()) == {len(inputs) - 1}
        logprobs = [math.log(sum_of((*read, token)) / sum_of(read)) for token in sequence.targets_T.tolist()]
        return TargetLogprobs(np.array(logprobs, np.float32), np.zeros(len(logprobs), dtype=bool))

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        return [self.scores(resolve_sequence(request.args[0])) for request in requests]


class ReadsShots(OnShots):
    """Answers with the label of the last shot of the question's kind."""

    def share(self, prompt: str, number: str) -> float:
        lines = prompt.replace(" \u2424 ", "\n").replace("\u2424", "\n").split("\n")
        asked = kind_of(lines[-1].strip())
        shots = [match for line in lines[:-1] if (match := SHOT.fullmatch(line.strip()))]
        (shown,) = {match[2] for match in shots if kind_of(match[1]) == asked}
        return 1.0 if number == shown else 1e-6


@pytest.mark.parametrize("kind", [KINDS[0], *exhaustive(*KINDS[1:])])
def test_who_reads_the_shots_is_right_and_a_guess_is_at_its_level(folder: Path, kind: str) -> None:
    options = options_of(folder, kind, context_lengths=[1500, 4000], num_samples=24)
    tokenizer = load_task("sb_many_shot_file", options).counter.tokenizer
    for model in (ReadsShots, OnShots):
        results = evaluated(model(tokenizer, range(10, 22)), ["sb_many_shot_file"], options)
        scores = results["results"]["sb_many_shot_file"]
        for length in (1500, 4000):
            exact, nll = (scores[f"{metric}@{length:07d},none"] for metric in ("exact_match", "answer_nll"))
            assert scores[f"chance@{length:07d},none"] == pytest.approx(1 / 12)
            if model is ReadsShots:
                assert exact == 1.0
                assert nll < 1e-3
            else:
                assert exact < 0.4  # all labels are equally probable, and assigned at random
                assert nll == pytest.approx(math.log(12), rel=1e-5)


def test_the_log_probability_of_a_label_is_the_sum_along_its_tokens() -> None:
    tree = LabelTree([(5, 1), (5, 2), (6,), (7, 1, 1), (7, 1, 2)])
    sequences = tree.sequences(np.array([3, 4]))
    assert [one.inputs_L.tolist() for one in sequences] == [[3, 4], [3, 4, 5], [3, 4, 7], [3, 4, 7, 1]]
    assert [one.targets_T.tolist() for one in sequences] == [[5, 6, 7], [1, 2], [1], [1, 2]]
    results = [
        TargetLogprobs(-one.targets_T.astype(np.float32) / len(one.inputs_L), np.zeros(len(one.targets_T), dtype=bool))
        for one in sequences
    ]
    expected = [-(5 / 2 + 1 / 3), -(5 / 2 + 2 / 3), -6 / 2, -(7 / 2 + 1 / 3 + 1 / 4), -(7 / 2 + 1 / 3 + 2 / 4)]
    assert tree.logprobs(results) == pytest.approx(expected)


def test_logits_that_are_no_numbers_are_an_error_or_no_score(folder: Path) -> None:
    for given in ({}, {"non_finite": "null"}):
        task = load_task("sb_many_shot_file", options_of(folder, "character", context_lengths=[1500], **given))
        task.build_all_requests(limit=1, rank=0, world_size=1)
        none = [
            TargetLogprobs(np.full(len(following), np.nan, np.float32), np.zeros(len(following), dtype=bool))
            for following in task.tree.next_of.values()
        ]
        if not given:
            with pytest.raises(UserError, match="try dtype=float32"):
                task.process_results(task.eval_docs[0], none)
            continue
        scores = task.process_results(task.eval_docs[0], none)
        assert math.isnan(scores["exact_match@0001500"])
        assert math.isnan(scores["answer_nll@0001500"])


def rows(field: str, start: int, count: int, labels: int) -> list[dict[str, Any]]:
    return [{"text": f"sentence {i}", field: i % labels} for i in range(start, start + count)]


@pytest.mark.parametrize("examples", [name for name in SOURCES if name != "file"])
def test_the_hubs_layouts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: str) -> None:
    source = SOURCES[examples]
    splits = {"train": datasets.Dataset.from_list(rows(source.label_field, 0, 60, 6))}
    if source.question_split:
        splits[source.question_split] = datasets.Dataset.from_list(rows(source.label_field, 50, 30, 6))
    asked: list[Any] = []

    def load_dataset(*place: Any, **options: Any) -> Any:
        asked.append((place, options))
        return datasets.DatasetDict(splits)

    monkeypatch.setattr("sbeval.tasks.ruler.texts.on_hub_or_cached", lambda dataset: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_labelled.cache_clear()
    found = load_labelled(examples, None)
    assert asked == [((source.path, source.config), {"revision": "refs/convert/parquet" if source.converted else None})]
    assert (found.labels, found.source) == (6, source.path)
    if source.question_split:
        assert found.questions == [f"sentence {i}" for i in range(60, 80)]  # the ten others are shots
        assert len(found.shots) == 60
    else:
        assert len(found.questions) == 6
    assert not set(found.questions) & set(found.shots)
    for texts, labels in ((found.shots, found.shot_labels), (found.questions, found.question_labels)):
        assert [int(text.split()[1]) % 6 for text in texts] == labels.tolist()
    load_labelled.cache_clear()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ""])
def test_local_copies_of_each_kind_hold_the_same(tmp_path: Path, suffix: str) -> None:
    table = datasets.Dataset.from_list(rows("coarse_label", 0, 60, 6))
    path = tmp_path / f"trec{suffix}"
    if not suffix:
        path.mkdir()
        for name, first in (("train", 0), ("test", 60)):
            lines = map(json.dumps, rows("coarse_label", first, 60, 6))
            (path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    elif suffix in (".json", ".jsonl"):
        table.to_json(path, lines=suffix == ".jsonl")
    else:
        (table.to_csv if suffix == ".csv" else table.to_parquet)(path)
    found = load_labelled("trec", str(path))
    assert (len(found.shots), len(found.questions)) == ((60, 60) if not suffix else (54, 6))
    assert found.labels == 6
    assert all(int(text.split()[1]) % 6 == label for text, label in zip(found.shots, found.shot_labels, strict=True))


def test_what_cannot_be_had_is_named_before_a_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", lambda *place: (_ for _ in ()).throw(OSError()))
    load_labelled.cache_clear()
    with pytest.raises(MissingCorpus) as error:
        check_options(["sb_many_shot", "sb_many_shot_file"], {})
    assert "trec from CogComp/trec (ConnectionError)" in str(error.value)
    assert '"banking77": "PATH"' in str(error.value)
    assert "examples_file from a path (none is given)" in str(error.value)
    check_options(["sb_many_shot_file"], {"examples_file": str(folder / "labelled.jsonl")})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a", "class": 1}\n', "Expected the columns text and label in train of .*, found text, class"),
        ('{"text": "a", "label": 1}\n' * 30, "found 1 labels and 0 questions"),
        ("{not json", "cannot be read as rows of labelled texts"),
    ],
)
def test_a_file_of_another_layout_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_labelled("file", str(path))


def test_what_a_user_can_mend_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Expected labelled texts at /no/such, found nothing"):
        load_task("sb_many_shot_file", options_of(folder, "character", examples_file="/no/such"))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="another kind of file"):
        load_labelled("file", str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match="sb_many_shot_file needs at least"):
        load_task("sb_many_shot_file", options_of(folder, "character", context_lengths=[100]))
    with pytest.raises(UserError, match="unknown key 'shots'"):
        load_task("sb_many_shot_file", options_of(folder, "character", sb_many_shot_file={"shots": 3}))


def test_all_of_a_hundred_labels_have_as_many_digits(tmp_path: Path, folder: Path) -> None:
    for labels in (2, 9, 10, 90, 91, 151):
        path = write_labelled(tmp_path / f"{labels}.jsonl", labels=labels, rows=20 * labels)
        options = options_of(folder, "byte_level_bpe", examples_file=str(path), context_lengths=[40_000], num_samples=1)
        numbers = load_task("sb_many_shot_file", options).generator.numbers.tolist()
        assert (len(numbers), len({len(str(number)) for number in numbers})) == (labels, 1)
        assert numbers[0] >= 1
