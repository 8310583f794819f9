import dataclasses
import json
from pathlib import Path

import pytest
from document_sums import sums_of
from experiment_files import write_extensions
from result_files import CURVES, model_record, ordinary_task, perplexity_task, ruler_task, write_run

from sbeval.errors import UserError
from sbeval.reports import compare, load_results
from sbeval.reports.analyse.claims import all_claims
from sbeval.reports.analyse.findings import model_facts
from sbeval.reports.analyse.panels import perplexity_panels
from sbeval.reports.analyse.selection import check_labels, choose_baseline, restrict
from sbeval.reports.figures.theme import DARK, LIGHT, choose_looks, within
from sbeval.reports.kinds.runs import run_facts
from sbeval.reports.read.fields import telling_name
from sbeval.reports.read.results import Results


def write(folder: Path, attention: str, **changes: object) -> None:
    task_changes = {key: changes.pop(key) for key in ("tokenizer_sha256", "corpus_sha256") if key in changes}
    model = model_record(attention, **changes)
    write_run(folder, model, [perplexity_task("stream", CURVES[attention], **task_changes)], log_samples=False)


def labels(results: Results) -> list[str]:
    return [model.label for model in results.models]


def test_a_model_is_named_after_what_attends_beyond_its_training_length(tmp_path: Path) -> None:
    named = {
        "demo-rope": None,
        "demo-rope (SelfExtend 8/512)": {"method": "self_extend", "group": 8, "window": 512},
        "demo-rope (SelfExtend 16/512)": {"method": "self_extend", "group": 16, "window": 512},
        "demo-rope (log-length temperature)": {"method": "log_length"},
        "demo-rope (of_a_later_version 3)": {"method": "of_a_later_version", "size": 3},
    }
    for index, extrapolation in enumerate(named.values()):
        write(tmp_path / str(index), "rope", extrapolation=extrapolation)
    assert set(labels(load_results([tmp_path]))) == set(named)


def test_runs_that_thought_or_began_answers_otherwise_are_lines_of_their_own(tmp_path: Path) -> None:
    asked = {"": (None, True), " (thinking 64)": (64, True), " (thinking 2,048)": (2048, None)}
    asked |= {" (thinking 64, answers not begun)": (64, False)}
    for index, (tokens, begun) in enumerate(asked.values()):
        name, results, record, samples = ruler_task("sb_niah_single_1", 1024)
        task = (name, results, {**record, "answer_prefix": begun}, samples)
        write_run(tmp_path / str(index), model_record("rope", thinking_tokens=tokens), [task])
    assert set(labels(load_results([tmp_path]))) == {f"demo-rope{words}" for words in asked}


def test_models_of_one_name_are_told_apart_by_what_differs_and_not_by_a_limit(tmp_path: Path) -> None:
    for index, scaling in enumerate((None, {"rope_type": "dynamic", "factor": 4.0})):
        write(tmp_path / str(index), "rope", rope_scaling=scaling)
    later = {"limit": 25, "seconds": 1.796e9, "date": "2026-11-21T10-00-00.000001"}
    write_run(tmp_path / "more", model_record("rope"), [ordinary_task("piqa", "acc", 0.5)], **later)
    assert sorted(labels(load_results([tmp_path]))) == ["demo-rope", "demo-rope (dynamic RoPE x4)"]


def test_a_checkpoint_that_another_model_of_lm_eval_ran_is_named_after_it(tmp_path: Path) -> None:
    for index, backend in enumerate((None, "hf", "local-completions at http://host:8000/v1/completions")):
        write(tmp_path / str(index), "rope", backend=backend)
    named = {"demo-rope", "demo-rope (hf)", "demo-rope (local-completions)"}
    assert set(labels(load_results([tmp_path]))) == named


def test_models_in_folders_of_one_name_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    for index, folder in enumerate(("wide/checkpoint/ckpt1", "deep/checkpoint/ckpt1")):
        model = model_record("rope", name="ckpt1", checkpoint_sha256=str(index) * 64)
        write_run(tmp_path / str(index), model, [ordinary_task("piqa", "acc", 0.5)], pretrained=f"/runs/{folder}")
    assert sorted(labels(load_results(str(tmp_path)))) == ["ckpt1 (deep)", "ckpt1 (wide)"]


def test_one_checkpoint_is_one_model_whether_or_not_a_run_recorded_its_seed(tmp_path: Path) -> None:
    for task, seed in (("piqa", None), ("arc_easy", 0)):
        model = model_record("rope", training_seed=seed)
        write_run(tmp_path / task, model, [ordinary_task(task, "acc", 0.5)])
    assert labels(load_results([tmp_path])) == ["demo-rope"]


def test_runs_of_one_model_whose_other_parts_differ_are_noted(tmp_path: Path) -> None:
    inputs = {"weights": "a" * 20, "tokenizer.json": "b" * 20, "generation_config.json": "c" * 20}
    dates = iter(("2026-11-21T10-00-00.000001", "2026-11-21T11-00-00.000001", "2026-11-21T12-00-00.000001"))
    for task, changed in (("piqa", {}), ("arc_easy", {"generation_config.json": "d" * 20}), ("boolq", {})):
        model = model_record("rope", inputs={**inputs, **changed})
        write_run(tmp_path / task, model, [ordinary_task(task, "acc", 0.5)], date=next(dates))
    notes = [note.reason for note in load_results([tmp_path]).notes]
    words = "older runs count as the same model as its newest one, although generation_config.json changed."
    assert (notes.count(f"demo-rope: {words}"), len(notes)) == (1, 1)


def test_what_a_self_test_found_is_a_note_unless_the_model_is_sound(tmp_path: Path) -> None:
    for task, sound in (("piqa", True), ("boolq", False)):
        model = model_record("rope", self_test={"sound": sound, "sentence": f"sound: {sound}"})
        write_run(tmp_path / task, model, [ordinary_task(task, "acc", 0.5)])
    assert [note.reason for note in load_results([tmp_path]).notes] == ["self-test: sound: False."]


def test_tensors_that_the_user_left_unread_are_a_note_and_all_unread_ones_a_fact_of_the_run(tmp_path: Path) -> None:
    unread = {"allowed": ["model.layers.2-3.mlp.up_proj.weight"], "declared": ["mtp.fc.weight"]}
    write_run(tmp_path / "cut", model_record("rope", unread=unread), [ordinary_task("piqa", "acc", 0.5)])
    write_run(tmp_path / "whole", model_record("rope", unread=None), [ordinary_task("boolq", "acc", 0.5)])
    results = load_results([tmp_path])
    (note,) = [note.reason for note in results.notes]
    allowed = "model.layers.2-3.mlp.up_proj.weight (allowed by allow_unread)"
    assert note == f"the model did not read all tensors of its checkpoint: {allowed}."
    facts = [run_facts(run).get("tensors left unread") for model in results.models for run in model.runs]
    assert {*facts} == {None, f"{allowed}; mtp.fc.weight (as the model's class declares)"}


def test_a_seed_is_named_only_where_nothing_else_tells_models_apart(tmp_path: Path) -> None:
    for seed in (0, 1):
        facts = {"dtype": f"float{16 * (seed + 1)}", "checkpoint_sha256": str(seed) * 64, "training_seed": seed}
        write(tmp_path / str(seed), "rope", **facts)
    assert sorted(labels(load_results([tmp_path]))) == ["demo-rope (float16)", "demo-rope (float32)"]


def test_labels_replace_names_and_two_models_never_share_one(tmp_path: Path) -> None:
    write(tmp_path / "a", "rope")
    assert labels(load_results([tmp_path], labels={"demo-rope": "Baseline"})) == ["Baseline"]
    write(tmp_path / "b", "stickbreaking")
    assert len(set(labels(load_results([tmp_path], labels={"demo-rope": "same", "demo-sb": "same"})))) == 2


def test_an_extension_has_its_own_colour_and_the_parent_is_dashed_beside_it(tmp_path: Path) -> None:
    write_extensions(tmp_path, schemes=["scheme_rope"])
    results = load_results([tmp_path])
    parent, child = "scheme_rope", "scheme_rope-4k"
    assert results.model(child).parent == parent
    chosen = choose_looks(results.models)
    assert chosen[parent].light != chosen[child].light
    both = within(chosen, [parent, child], {child: parent})
    assert both[parent].dashed
    assert not both[child].dashed
    assert not within(chosen, [parent], {child: parent})[parent].dashed


def test_a_scheme_has_the_same_colour_in_every_report(tmp_path: Path) -> None:
    for attention in ("rope", "alibi"):
        write(tmp_path / attention, attention)
    without = choose_looks(load_results([tmp_path]).models)
    write(tmp_path / "sb", "stickbreaking")
    beside = choose_looks(load_results([tmp_path]).models)
    assert without["demo-rope"].light == beside["demo-rope"].light
    assert len({look.light for look in beside.values()}) == 3


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_every_colour_reads_as_text_on_its_page(tmp_path: Path) -> None:
    for index in range(9):
        write(tmp_path / str(index), "rope", name=f"model {index}", checkpoint_sha256=f"{index:064x}")
    for look in choose_looks(load_results([tmp_path]).models).values():
        assert contrast(look.light, LIGHT["paper"]) >= 4.5
        assert contrast(look.dark, DARK["paper"]) >= 4.5
    for colours in (LIGHT, DARK):
        assert contrast(colours["muted"], colours["paper"]) >= 4.5


def test_different_tokenizers_share_an_axis_in_bits_per_byte_only_and_different_texts_none(tmp_path: Path) -> None:
    write(tmp_path / "a", "rope")
    write(tmp_path / "tokenizer" / "b", "stickbreaking", tokenizer_sha256="ab" * 32)
    write(tmp_path / "text" / "b", "stickbreaking", corpus_sha256="dd" * 32)
    tokenizers, texts = (load_results([tmp_path / "a", tmp_path / other]) for other in ("tokenizer", "text"))
    (panel,) = perplexity_panels(tokenizers.measurements, tokenizers.models)
    assert list(panel.tables) == ["bits_per_byte"]
    assert "different tokenizers" in panel.remarks[0]
    panels = perplexity_panels(texts.measurements, texts.models)
    assert [panel.labels for panel in panels] == [("demo-rope",), ("demo-sb",)]
    assert len({panel.stem for panel in panels}) == 2


def test_one_text_under_two_names_is_one_text(tmp_path: Path) -> None:
    for hour, (attention, corpus) in enumerate([("stickbreaking", "stdlib_311"), ("rope", "stdlib")]):
        _, *task = perplexity_task("stream", CURVES[attention], corpus=corpus, corpus_sha256="dd" * 32)
        date = f"2026-11-20T{hour:02d}-00-00.000001"
        write_run(tmp_path, model_record(attention), [("sb_stdlib_stream", *task)], date=date)
    results = load_results([tmp_path])
    (panel,) = perplexity_panels(results.measurements, results.models)
    assert set(panel.labels) == {"demo-rope", "demo-sb"}
    assert panel.corpus == "stdlib", "what the newest run calls it"
    assert {number.group for number in compare("demo-rope", "demo-sb", paths=[tmp_path]).lengths} == {"stdlib, stream"}


def test_only_keeps_the_models_and_tasks_named_and_the_baseline_is_rope_unless_named(tmp_path: Path) -> None:
    write(tmp_path / "a", "rope")
    write(tmp_path / "b", "stickbreaking")
    two = load_results([tmp_path])
    assert labels(restrict(two, ["demo-r*"])) == ["demo-rope"]
    assert set(restrict(two, ["demo-r*"]).measurements["setting"]) == {"demo-rope"}
    assert labels(restrict(two, ["sb_stdlib_stream"])) == ["demo-sb", "demo-rope"]
    with pytest.raises(UserError, match="demo-sb, demo-rope"):
        restrict(two, ["nothing"])
    write_run(tmp_path / "c", model_record("alibi"), [ordinary_task("hellaswag", "acc_norm", 0.5)])
    assert labels(restrict(load_results([tmp_path]), ["hellaswag"])) == ["demo-alibi"]
    write_run(tmp_path / "d", model_record("rope"), [perplexity_task("fixed_target", CURVES["rope"])])
    sampled = load_results([tmp_path])
    sampled = dataclasses.replace(sampled, measurements=sampled.measurements[:0])  # documents' sums are left
    assert labels(restrict(sampled, ["sb_stdlib_fixed_target"])) == ["demo-rope"]
    assert choose_baseline(two.models, None) == "demo-rope"
    assert choose_baseline(two.models, "demo-sb") == "demo-sb"
    with pytest.raises(UserError, match="'other'"):
        choose_baseline(two.models, "other")


def test_of_one_task_run_with_several_limits_the_most_samples_count(tmp_path: Path) -> None:
    model = model_record("rope")
    first = perplexity_task("stream", CURVES["rope"])
    again = perplexity_task("stream", [value + 1 for value in CURVES["rope"]])
    write_run(tmp_path / "all", model, [first], limit=8)
    write_run(tmp_path / "few", model, [again], limit=2, seconds=1.796e9, date="2026-11-21T10-00-00.000001")
    for run, used in (("all", 8), ("few", 2)):
        (file,) = (tmp_path / run).glob("results_*.json")
        content = json.loads(file.read_text(encoding="utf-8"))
        content["n-samples"]["sb_stdlib_stream"] = {"original": 40, "effective": used}
        file.write_text(json.dumps(content), encoding="utf-8")
    results = load_results([tmp_path])
    assert labels(results) == ["demo-rope"]
    rows = results.measurements
    assert rows[rows["metric"] == "nll"]["value"].max() < 6
    assert set(rows["limit_samples"]) == {8.0}
    used, whole = (sums_of(one, "demo-rope", "sb_stdlib_stream") for one in (results, load_results([tmp_path / "all"])))
    assert used.nll_nats.sum() == pytest.approx(whole.nll_nats.sum())
    assert [note.reason for note in results.notes if "was run on more samples" in note.reason]


@pytest.mark.parametrize(
    ("name", "pretrained", "shown"),
    [
        ("checkpoint", "build/runs/rope_extended/checkpoint", "rope_extended"),
        ("final", "rope/checkpoints/final/", "rope"),
        ("checkpoint-500", "runs/rope/checkpoint-500", "rope/checkpoint-500"),
        ("checkpoint", "checkpoint", "checkpoint"),
        ("stickbreaking", "sbeval/demo/checkpoints/stickbreaking", "stickbreaking"),
        ("model", "", "model"),
    ],
)
def test_a_checkpoint_named_like_others_is_called_after_the_folder_above(
    name: str, pretrained: str, shown: str
) -> None:
    assert telling_name(name, pretrained) == shown


def test_extended_checkpoints_of_one_folder_name_keep_apart_and_name_their_parent(tmp_path: Path) -> None:
    write(tmp_path / "parent", "rope", checkpoint_sha256="a" * 64)
    for index, scheme in enumerate(("one", "two")):
        parent = {"name": "checkpoint", "sha256": "a" * 64, "training_length_tokens": 1024}
        facts = {"name": "checkpoint", "checkpoint_sha256": str(index) * 64, "extended_from": parent}
        record = model_record("rope", training_length_tokens=4096, **facts)
        path = write_run(tmp_path / scheme, record, [perplexity_task("stream", CURVES["rope"])], log_samples=False)
        content = json.loads(path.read_text(encoding="utf-8"))
        content["config"]["model_args"] = {"pretrained": f"runs/{scheme}_extended/checkpoint"}
        path.write_text(json.dumps(content), encoding="utf-8")
    results = load_results([tmp_path])
    assert {"one_extended", "two_extended"} < set(labels(results))
    assert model_facts(results.model("one_extended")).endswith("extended from demo-rope")


@pytest.mark.parametrize("names", [("first", "second"), ("text", "text")])
def test_one_task_on_two_texts_makes_two_claims(names: tuple[str, str], tmp_path: Path) -> None:
    rising = [value + 0.1 * place for place, value in enumerate(CURVES["stickbreaking"])]
    for place, (name, curve) in enumerate(zip(names, (CURVES["stickbreaking"], rising), strict=True)):
        _, *task = perplexity_task("fixed_target", curve, corpus=name, corpus_sha256=str(place) * 64)
        seconds = 1_795_000_000.0 + place
        write_run(tmp_path / str(place), model_record("rope"), [("sb_text_fixed_target", *task)], seconds=seconds)
    results = load_results([tmp_path])
    claims = all_claims(results)
    second = names[1] if names[1] != names[0] else "text (2)"
    raises_from = {corpus: claim.raises_from_tokens for (_, corpus, _), claim in claims.items()}
    assert raises_from == {names[0]: None, second: 2048}
    assert {panel.corpus for panel in perplexity_panels(results.measurements, results.models)} == {names[0], second}


def test_what_is_left_aside_is_said_under_the_figure_of_its_own_text_alone(tmp_path: Path) -> None:
    runs = [("novel", "a", [256, 512]), ("novel", "b", [256, 512, 1024]), ("essays", "c", [256, 512])]
    for place, (corpus, targets, lengths) in enumerate(runs):
        record = {"lengths": lengths, "corpus": corpus, "targets_sha256": targets * 64}
        _, *task = perplexity_task("fixed_target", CURVES["rope"][: len(lengths)], **record)
        seconds = 1_795_000_000.0 + place
        write_run(tmp_path / str(place), model_record("rope"), [("sb_text_fixed_target", *task)], seconds=seconds)
    results = load_results([tmp_path])
    panels = {
        panel.corpus: " ".join(panel.remarks) for panel in perplexity_panels(results.measurements, results.models)
    }
    assert "Not shown, since other targets were scored: demo-rope at 256, 512." in panels["novel"]
    assert "Not shown" not in panels["essays"]


def test_a_label_names_a_text_and_two_texts_never_share_one(tmp_path: Path) -> None:
    tasks = [
        perplexity_task("stream", CURVES["rope"][:2], lengths=[256, 512], corpus=corpus, documents=3)
        for corpus in ("text", "other")
    ]
    write_run(tmp_path / "r", model_record("rope"), tasks, log_samples=False)
    found = load_results([tmp_path], labels={"text": "Moby Dick", "demo-rope": "RoPE"})
    assert set(found.measurements["corpus"]) == {"Moby Dick", "other"}
    assert labels(found) == ["RoPE"]
    check_labels(found, {"text": "Moby Dick"})
    with pytest.raises(UserError, match="one of demo-rope, other, text, found 'Moby Dick'"):
        check_labels(found, {"Moby Dick": "text"})
    both = load_results([tmp_path], labels={"text": "A novel", "other": "A novel"})
    assert set(both.measurements["corpus"]) == {"A novel", "A novel (2)"}
    assert set(load_results([tmp_path], labels={"text": "other"}).measurements["corpus"]) == {"other", "other (2)"}
