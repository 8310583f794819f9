"""Every sentence of a report against a planted truth: by protocol, and at the ends of every range of lengths."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from result_files import LENGTHS, Task, model_record, perplexity_task, position_task, reported, ruler_task, write_run

from sbeval.reports.analyse.protocols import curve_text, difference_text, on_identical_targets
from sbeval.reports.figures.heatmaps import SCORES, TITLE_LETTER_PIXELS, grid, length_bands
from sbeval.reports.read.fields import length_text
from sbeval.reports.section import Report
from sbeval.results.records import IDENTICAL_TARGETS

OTHER_PROTOCOLS = ("stream", "sliding", "rolling", "a protocol of tomorrow")
FALLS, BREAKS, FLAT = [2.4, 2.3, 2.2, 2.1, 2.0], [2.4, 2.3, 2.2, 3.1, 4.0], [2.2] * 5
USE_OF_CONTEXT = re.compile(
    r"longer context helps|it helps|is worth|context costs|lowers NLL|NLL falls|need at most|half of the targets"
    r"|begins to work|effective length|measurably lower|identical targets(?! \()",
    re.IGNORECASE,
)


def texts_of(value: object) -> Iterator[str]:
    """Yields every text of a report, of its tables, and of its figures: titles, axes, descriptions, tooltips."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from texts_of(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def said(report: Report) -> list[str]:
    """Returns every sentence of a page, except those on provenance."""
    shown = [section for section in report.sections if section.identifier not in ("speed", "provenance")]
    return list(dict.fromkeys(texts_of(dataclasses.replace(report, sections=tuple(shown), looks={}))))


def steps_of_training(folder: Path, protocol: str) -> None:
    for step in (1, 2):
        model = model_record("rope", name=f"checkpoint-{step}", checkpoint_sha256=str(step) * 64)
        tasks = [perplexity_task(protocol, FALLS, lengths=LENGTHS[:5], seed=step)]
        write_run(folder / str(step), model, tasks, pretrained=f"/training/checkpoint-{step}")


@pytest.mark.parametrize("protocol", [*IDENTICAL_TARGETS, *OTHER_PROTOCOLS])
def test_use_of_context_is_claimed_on_identical_targets_alone(protocol: str, tmp_path: Path) -> None:
    for attention, curve in (("stickbreaking", FALLS), ("rope", BREAKS)):
        task = perplexity_task(protocol, curve, lengths=LENGTHS[:5])
        write_run(tmp_path / attention, model_record(attention), [task])
    steps_of_training(tmp_path / "training", protocol)
    sentences = said(reported(tmp_path))
    claims = [sentence for sentence in sentences if USE_OF_CONTEXT.search(sentence)]
    claims = [sentence for sentence in claims if "that takes the same targets" not in sentence]
    assert bool(claims) is (protocol in IDENTICAL_TARGETS), claims
    assert any("Below zero does not show that it uses" in sentence for sentence in sentences) is not bool(claims)


@pytest.mark.parametrize("protocol", OTHER_PROTOCOLS)
def test_a_sentence_on_identical_targets_is_refused_for_another_protocol(protocol: str) -> None:
    with pytest.raises(ValueError, match="identical targets"):
        on_identical_targets(protocol, "The longer context helps.")
    assert "helps" not in " ".join(difference_text(protocol))
    assert "worth" not in curve_text(protocol)


def test_the_guide_to_curves_says_what_the_page_says() -> None:
    guide = " ".join((Path(__file__).parents[2] / "docs/reading-curves.md").read_text(encoding="utf-8").split())
    for protocol in ("fixed_target", "stream"):
        words = difference_text(protocol)
        for sentence in filter(None, re.split(r"(?<=\.) ", f"{words.longer} {words.shorter}".strip())):
            assert sentence in guide


ENDS: dict[str, tuple[list[int], int | None]] = {
    "one length": ([1024], 1024),
    "longest is the training length": ([256, 512, 1024], 1024),
    "training length between two": ([256, 512, 2048, 4096], 1024),
    "training length among them": ([256, 512, 1024, 2048, 4096], 1024),
    "all beyond": ([2048, 4096], 1024),
    "all below": ([256, 512], 1024),
    "unknown": ([256, 1024, 4096], None),
}
TRUTHS = {"falls": FALLS, "breaks": BREAKS, "flat": FLAT, "rises, then falls": [2.0, 2.2, 2.1, 2.0, 1.9]}
TOKENS = {length_text(length): length for length in LENGTHS}


def untrue(sentence: str, at: dict[int, float], trained: int | None, headline: str = "") -> Iterator[str]:
    """Yields the false claims of a sentence about one model; `at` holds the true NLL of the compared lengths."""
    lengths = sorted(at)
    within = [length for length in lengths if trained is not None and length <= trained]
    beyond = [length for length in lengths if trained is not None and length > trained]
    before = dict(zip(lengths[1:], lengths, strict=False))
    reference = within[-1] if within and beyond else None

    def length_in(pattern: str) -> list[int]:
        return [TOKENS[name] for name in re.findall(pattern, sentence)]

    for length in length_in(r"lowers NLL (?:up|all the way) to (\d\w*)") + ([TOKENS[headline]] if headline else []):
        if length not in before or at[length] >= at[before[length]]:
            yield f"lowers up to {length}"
    if re.search(r"(?:no|No) context (?:length|up to \w+) has a measurably lower NLL", sentence) and any(
        at[length] < at[before[length]] for length in before
    ):
        yield "no step is a gain"
    if "no later step does so" in sentence:
        named = length_in(r"lowers NLL (?:up|all the way) to (\d\w*)")[0]
        if any(at[length] < at[before[length]] for length in lengths if length > named):
            yield "no later gain"
    beyond_words = r"a rise .*is ruled out|measurably worse than \d|not measurably higher|lower at the longest"
    if reference is None and re.search(beyond_words, sentence):
        yield "something beyond the training length"
    for other in length_in(r"(?:worse than|its value at) (\d\w*)"):
        if other != reference:
            yield f"compared with {other}"
    for length in length_in(r"from (\d\w*) on, NLL is above") + length_in(r"from (\d\w*) on for"):
        if reference is None or at[length] <= at[reference]:
            yield f"raises from {length}"
    rises = reference is not None and any(at[length] > at[reference] + 0.02 for length in beyond)
    if rises and "no context up to" in sentence and "worse" in sentence:
        yield "nowhere worse"
    if "beyond the training length" in sentence and "none of the lengths compared" in sentence and beyond:
        yield "none beyond"
    if "no longer one compared" in sentence and beyond:
        yield "none beyond, in a table"
    for length in length_in(r"no length beyond (\d\w*) was compared"):
        if trained is None or lengths[-1] > length:
            yield f"none beyond {length}, in a table"
    for length in length_in(r"no length up to (\d\w*) was compared"):
        if trained is None or lengths[0] <= length:
            yield f"none up to {length}, in a table"
    for length in length_in(r"none of the lengths compared is beyond the training length of (\d\w*)"):
        if lengths[-1] > length:
            yield f"none beyond {length}"
    if "none of the lengths compared is within" in sentence and within:
        yield "none within"
    if re.search("no length beyond the training length was evaluated|longest evaluated", sentence):
        yield "what was evaluated"
    for share in re.findall(r"(\d+)%(?: \[[^]]*\])? more than", sentence):
        needs_more = reference is not None and at[lengths[-1]] < at[reference] - 0.02
        if reference is None or (int(share) > 50) is not needs_more:
            yield f"{share}% need more"


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("case", ENDS)
def test_sentences_are_true_at_the_ends_of_every_range(case: str, truth: str, tmp_path: Path) -> None:
    lengths, trained = ENDS[case]
    known = dict(zip(LENGTHS, TRUTHS[truth], strict=False))
    for name in ("a", "b"):
        curve = [known[length] for length in lengths]
        tasks = [
            perplexity_task(protocol, curve, lengths=lengths, documents=24, seed=5)
            for protocol in ("fixed_target", "stream")
        ]
        record = model_record("rope", name=name, checkpoint_sha256=name * 64, training_length_tokens=trained)
        write_run(tmp_path / name, record, tasks)
    check(reported(tmp_path), {length: known[length] for length in lengths}, trained)


def check(report: Report, at: dict[int, float], trained: int | None) -> None:
    """Asserts that no sentence of a report on models of one truth is untrue."""
    for sentence in said(report):
        assert not list(untrue(sentence, at, trained)), sentence
    for headline in (headline for finding in report.findings for headline in finding.headlines):
        falls = headline.meaning.startswith("NLL falls up to here")
        named = headline.value.removeprefix("≥ ") if falls else ""
        assert not list(untrue(headline.meaning, at, trained, named)), headline
        assert ">" not in headline.value
        if headline.value.startswith("≥"):
            assert TOKENS[named] == max(at)


def damaged(task: Task, lengths: list[int]) -> Task:
    """Returns the task with samples that do not add up to its numbers at some lengths."""
    for sample, length in itertools.product(task[3], lengths):
        for row in sample[f"nll@{length:07d}"]:
            row[1] *= 1.5
    return task


@pytest.mark.parametrize("left_out", [[2048, 4096], [4096], [256]])
def test_a_length_that_was_left_out_is_not_said_to_be_unevaluated(left_out: list[int], tmp_path: Path) -> None:
    task = damaged(perplexity_task("fixed_target", FALLS, lengths=LENGTHS[:5]), left_out)
    write_run(tmp_path, model_record("rope"), [task])
    report = reported(tmp_path)
    compared = {length: nll for length, nll in zip(LENGTHS, FALLS, strict=False) if length not in left_out}
    check(report, compared, 1024)
    assert any(f"samples at {length_text(left_out[0])}" in note.reason for note in report.notes)


@pytest.mark.parametrize("lengths", [[256, 512, 1024], [256, 512, 1024, 2048], [1024, 2048], [512, 2048], [2048, 4096]])
def test_an_extended_model_is_compared_with_a_length_that_is_named(lengths: list[int], tmp_path: Path) -> None:
    origin = {"name": "base", "sha256": "a" * 64, "training_length_tokens": 1024}
    known = dict(zip(LENGTHS, BREAKS, strict=False))
    for name in ("a", "b"):
        record = model_record("rope", name=name, training_length_tokens=2048, extended_from=origin)
        record = dataclasses.replace(record, checkpoint_sha256=name * 64)
        write_run(
            tmp_path / name, record, [perplexity_task("fixed_target", [known[n] for n in lengths], lengths=lengths)]
        )
    report = reported(tmp_path)
    assert report.overview_table is not None
    heading = report.overview_table.header[3].text
    reference = max((n for n in lengths if n <= 1024), default=max((n for n in lengths if n <= 2048), default=0))
    row = report.overview_table.rows[0].cells
    assert row[1].text == ("2K" if reference == 2048 else f"2K, compared with {length_text(reference)}")
    assert ("the length compared with" in heading) is (reference != 2048)


def test_lengths_between_the_two_training_lengths_of_an_extended_model_are_not_denied(tmp_path: Path) -> None:
    origin = {"name": "base", "sha256": "a" * 64, "training_length_tokens": 1024}
    at = dict(zip([2048, 4096], [2.1, 2.0], strict=True))
    record = model_record("rope", training_length_tokens=4096, extended_from=origin)
    tasks = [perplexity_task(protocol, [*at.values()], lengths=[*at]) for protocol in ("fixed_target", "stream")]
    write_run(tmp_path, record, tasks)
    check(reported(tmp_path), at, 4096)


def repeated_places(sentence: str) -> list[str]:
    """Returns numbers that a sentence gives twice at one place, such as "39% at 1K, 39% at 1K"."""
    places = re.findall(r"[\d.,]+%?(?: nats)? (?:at|around position|around) \w+", sentence)
    return [place for place, other in itertools.pairwise(places) if place == other]


def test_a_number_at_one_length_is_said_once(tmp_path: Path) -> None:
    tasks = [
        *(perplexity_task(protocol, [2.0], lengths=[1024]) for protocol in ("fixed_target", "stream", "rolling")),
        *(ruler_task(name, 400, lengths=[1024]) for name in ("sb_niah_single_1", "sb_ruler_vt")),
        position_task([2.0] * 9, longest=1024),
    ]
    write_run(tmp_path, model_record("rope"), tasks)
    for sentence in said(reported(tmp_path)):
        assert not repeated_places(sentence)
        assert not re.search(r"from (\w+) to \1\b", sentence)


def test_lengths_that_a_task_cannot_fill_are_named_on_the_page(tmp_path: Path) -> None:
    short, whole = (
        ruler_task("sb_ruler_vt", 400, lengths=LENGTHS[:2]),
        ruler_task("sb_ruler_cwe", 400, lengths=LENGTHS[:3]),
    )
    assert short[2] is not None
    short[2]["dropped_lengths"] = [1024]
    write_run(tmp_path, model_record("rope"), [short, whole])
    report = reported(tmp_path)
    assert any("left out" in remark and "1K of sb_ruler_vt for demo-rope" in remark for remark in report.caveats)
    explanations = [figure.caption.explanation for part in report.sections for figure in part.figures]
    assert any("No mean at 1K for demo-rope, which has no score of vt there." in words for words in explanations)
    write_run(tmp_path / "later", model_record("rope"), [ruler_task("sb_ruler_vt", 400, lengths=[1024])])
    assert not any("left out" in remark for remark in reported(tmp_path).caveats)


def test_zero_of_a_model_whose_training_length_was_not_compared_is_named(tmp_path: Path) -> None:
    lengths = LENGTHS[:5]
    for name, trained in (("whole", 1024), ("between", 1500)):
        record = model_record("rope", name=name, training_length_tokens=trained, checkpoint_sha256=name[0] * 64)
        write_run(tmp_path / name, record, [perplexity_task("fixed_target", BREAKS, lengths=lengths)])
    for curve, words in ((lengths, "NLL at 1K"), ([256, 512, 2048, 4096], "")):
        if curve != lengths:
            record = model_record("nope", name="third", training_length_tokens=1024)
            write_run(
                tmp_path / "third", record, [perplexity_task("fixed_target", [2.4, 2.3, 3.1, 4.0], lengths=curve)]
            )
        report = reported(tmp_path)
        (caption,) = [
            f.caption for s in report.sections for f in s.figures if f.caption.title.endswith("target: difference")
        ]
        assert words in caption.explanation
    assert "The difference is zero at 1K for between; at 512 for third" in caption.explanation


@pytest.mark.parametrize(
    "title", ["needle depth (% from the start)", "position in the window (octaves, from)", "document"]
)
@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 11, 24])
def test_the_title_beside_a_map_is_no_longer_than_the_map(title: str, numbers: bool, rows: int) -> None:
    cells = [{"length": "1K", "row": float(row), "value": 0.5, "text": "50"} for row in range(rows)]
    options: dict[str, Any] = {"shades": SCORES, "tooltip": {}, "numbers": numbers}
    drawn = grid(cells, length_bands([1024]), rows=list(range(rows)), y_title=title, **options)
    shown = drawn["encoding"]["y"]["title"]
    lines = [shown] if isinstance(shown, str) else shown
    assert " ".join(lines) == title
    assert max(map(len, lines)) * TITLE_LETTER_PIXELS <= drawn["height"]


@pytest.mark.parametrize("lengths", [[256, 512], [512, 2048]], ids=str)
def test_intervals_are_called_doubtful_only_where_a_sentence_rests_on_one(lengths: list[int], tmp_path: Path) -> None:
    task = perplexity_task("stream", [2.2, 2.1], lengths=lengths, size_log_deviation=1.6)
    write_run(tmp_path, model_record("rope"), [task])
    (finding,) = reported(tmp_path).findings
    (sentence,) = [sentence for sentence in finding.sentences if sentence.startswith("In stream windows")]
    assert ("doubtful" in sentence) is (lengths[-1] > 1024)
