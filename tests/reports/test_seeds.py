from pathlib import Path

import numpy as np
import pytest
from experiment_files import LENGTHS, SCHEMES, scheme_curve, scheme_model, write_extensions, write_schemes
from result_files import CURVES, model_record, ordinary_task, perplexity_task, text_of, write_run

from sbeval.reports import load_results
from sbeval.reports.analyse.panels import perplexity_panels
from sbeval.reports.analyse.selection import pool_seeds, restrict
from sbeval.reports.read.results import Results
from sbeval.reports.read.samples import DOCUMENT_SUMS


def write_seed(folder: Path, seed: int, *, lengths: int = 9, **changes: object) -> None:
    curve = scheme_curve("scheme_rope", seed, LENGTHS[:lengths])
    task = perplexity_task("fixed_target", curve, lengths=LENGTHS[:lengths])
    write_run(folder / str(seed), scheme_model("scheme_rope", seed, **changes), [task])


def write_seeds(folder: Path, count: int) -> Path:
    for seed in range(count):
        write_seed(folder, seed)
    return folder


def nll(results: Results) -> dict[int, dict[str, float]]:
    rows = results.measurements[results.measurements["metric"] == "nll"]
    return {int(row["context_length_tokens"]): row for row in rows.to_dict("records")}


def test_seeds_are_one_line_at_their_mean_with_the_lowest_and_highest_beside_it(tmp_path: Path) -> None:
    single = load_results([write_seeds(tmp_path, 3)])
    pooled = pool_seeds(single)
    assert [(model.label, model.seeds, len(model.runs)) for model in pooled.models] == [("scheme_rope", 3, 3)]
    of_each = single.measurements[single.measurements["metric"] == "nll"]
    values = of_each.pivot(index="context_length_tokens", columns="setting", values="value")
    for length, row in nll(pooled).items():
        own = values.loc[length].to_numpy()
        assert (row["value"], row["seed_low"], row["seed_high"]) == pytest.approx((own.mean(), own.min(), own.max()))
        assert row["ci95_high"] - row["ci95_low"] > 0.01
    rows = pooled.measurements.pivot(index="context_length_tokens", columns="metric", values="value")
    assert rows["token_perplexity"].to_numpy() == pytest.approx(np.exp(rows["nll"].to_numpy(dtype=float)))
    ((_, sums),) = pooled[DOCUMENT_SUMS].items()
    own = [part.nll_nats for part in single[DOCUMENT_SUMS].values()]
    assert sums.nll_nats == pytest.approx(np.mean(own, axis=0)), "claims rest on the mean of each document"
    assert len(sums.clusters) == 60


def test_a_seed_that_also_ran_another_task_with_a_limit_is_still_one_of_them(tmp_path: Path) -> None:
    write_seeds(tmp_path, 3)
    later = {"limit": 25, "date": "2026-11-21T10-00-00.000001", "seconds": 1.796e9}
    write_run(tmp_path / "more", scheme_model("scheme_rope", 0), [ordinary_task("piqa", "acc", 0.5)], **later)
    pooled = pool_seeds(load_results([tmp_path]))
    assert [(model.label, model.seeds) for model in pooled.models] == [("scheme_rope", 3)]


def test_a_length_that_one_seed_lacks_is_a_gap_with_a_note(tmp_path: Path) -> None:
    write_seed(tmp_path, 0)
    write_seed(tmp_path, 1, lengths=7)
    pooled = pool_seeds(load_results([tmp_path]))
    assert max(nll(pooled)) == LENGTHS[6]
    assert any("at 32K, 64K was not run with every seed" in note.reason for note in pooled.notes)


@pytest.mark.exhaustive
def test_a_task_that_one_seed_ran_is_shown_for_that_seed(tmp_path: Path) -> None:
    write_schemes(tmp_path / "schemes", seeds=2)
    write_extensions(tmp_path / "extensions", schemes=["scheme_rope"])
    pooled = pool_seeds(load_results([tmp_path]))
    (pile,) = [p for p in perplexity_panels(pooled.measurements, pooled.models) if p.corpus == "pile_10k"]
    assert pile.labels == ("scheme_rope", "scheme_rope-4k")
    assert pooled.model("scheme_rope-4k").parent == "scheme_rope"


def test_names_tell_seeds_where_checkpoints_keep_none(tmp_path: Path) -> None:
    for seed in range(2):
        model = model_record("rope", name=f"base-seed{seed}", checkpoint_sha256=f"{seed:064x}")
        write_run(tmp_path / str(seed), model, [perplexity_task("stream", CURVES["rope"])])
    assert [model.label for model in pool_seeds(load_results([tmp_path])).models] == ["base"]


def test_recipes_that_name_their_seed_are_one_recipe(tmp_path: Path) -> None:
    for seed, name in enumerate(["rope", "rope_seed1", "rope_seed3"]):
        write_seed(tmp_path, seed, recipe=name)
    # the recipe called seed3 was trained with seed 2, so its name is not that of its seed
    assert [model.seeds for model in pool_seeds(load_results([tmp_path])).models] == [2, 1]


def test_a_plural_before_a_number_is_not_a_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_seed(tmp_path, seed, recipe=f"mixes{seed}")
    assert [model.seeds for model in pool_seeds(load_results([tmp_path])).models] == [1, 1]


def test_seeds_of_a_recipe_stay_apart_with_a_note_if_two_models_have_the_same(tmp_path: Path) -> None:
    write_seeds(tmp_path, 2)
    write_seed(tmp_path / "again", 1, checkpoint_sha256="f" * 64)
    results = pool_seeds(load_results([tmp_path]))
    assert [model.seeds for model in results.models] == [1, 1, 1]
    assert [note.reason for note in results.notes if "are not merged" in note.reason and "seed, 1" in note.reason]


@pytest.mark.parametrize("change", [{"sliding_window": 512}, {"training_length_tokens": 2048}, {"parameters": 9}])
def test_checkpoints_that_differ_in_more_than_the_seed_stay_apart(tmp_path: Path, change: dict[str, int]) -> None:
    write_seed(tmp_path, 0)
    write_seed(tmp_path, 1, **change)
    assert len(pool_seeds(load_results([tmp_path])).models) == 2


def test_one_seed_can_be_shown_alone(tmp_path: Path) -> None:
    results = load_results([write_seeds(tmp_path, 2)])
    chosen = restrict(results, [next(one.label for one in results.models if "seed 1" in one.label)])
    assert pool_seeds(chosen).models[0].seeds == 1


@pytest.mark.exhaustive
def test_the_scheme_recipes_become_the_papers_three_panels(tmp_path: Path) -> None:
    write_schemes(tmp_path)
    results = pool_seeds(load_results([tmp_path]))
    panels = [p for p in perplexity_panels(results.measurements, results.models) if p.protocol == "stream"]
    by_aspect = {panel.aspect: {label.removeprefix("scheme_") for label in panel.labels} for panel in panels}
    assert by_aspect == {
        "position scheme, trained at 1K": {
            *("stickbreaking", "stickbreaking_remainder", "stickbreaking_remainder_norm"),
            *("rope", "nope", "alibi", "fire", "forgetting"),
            *("ssmax", "entmax", "asentmax", "nape", "nape_asentmax"),
        },
        "training length": {"stickbreaking", "rope", "rope_4x", "rope_4x_dynamic"},
        "attention window": {"stickbreaking", "rope", "rope_window_1024", "rope_window_256", "rope_window_512"},
    }
    assert len(SCHEMES) == 18


@pytest.mark.exhaustive
def test_a_page_of_seeds_says_so_and_its_tables_keep_every_seed(tmp_path: Path) -> None:
    page = text_of(write_seeds(tmp_path / "results", 2), "index.html")
    assert "A line over several training seeds is their mean" in page
    assert "mean of 2 training seeds" in page
    assert "(seed 1)" in (tmp_path / "report" / "results.csv").read_text(encoding="utf-8")
