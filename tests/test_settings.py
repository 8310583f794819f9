"""Settings models: an impossible value gives an error of one sentence, and a value means the same in all of them."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sbeval.errors import UserError
from sbeval.foreign_files import read_yaml
from sbeval.settings import Counts, Lengths, LocalPath, PathText, Settings, as_counts, read_value
from sbeval.tasks.metadata import PERPLEXITY_SEED, SAMPLES_SEED, TaskOptions
from sbeval.tasks.user_options import options_classes

HOMES = ("sbeval.model_adapters.options", "sbeval.sweep.definition", "sbeval.training.recipe")
OPTIMIZATION = {"learning_rate": 1, "total_tokens": 640, "batch_tokens": 16, "warmup_steps": 1}
# required fields
REQUIRED: dict[str, dict[str, Any]] = {
    "NiahOptions": {
        **{"type_haystack": "noise", "type_needle_k": "words", "type_needle_v": "numbers"},
        **{"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1},
    },
    "VtOptions": {"type_haystack": "noise", "num_chains": 1, "num_hops": 4, "num_fewshot": 1},
    "CweOptions": {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10, "num_fewshot": 1},
    "FweOptions": {"alpha": 2, "coded_wordlen": 6, "vocab_size": 0},
    "ManyShotOptions": {"examples": "trec"},
    "QaOptions": {"dataset": "squad"},
    "AssociationOptions": {"type_haystack": "noise", "people": 2},
    "LongBenchOptions": {"stratum": "short"},
    "TurnsOptions": {"same_turns": 2},
    "TallyOptions": {"question": "count", "items": 32, "labels": 4},
    "MrcrOptions": {"needles": 2},
    **{
        f"Graded{kind}Options": {"level": "basic", "form": "direct", **options}
        for kind, options in {
            "": {},
            "Needle": {"others": "none", "near_keys": 0},
            "Variables": {"hops": 1, "other_chains": 0},
            "Words": {"asked": 1, "frequent_repeats": 30, "other_repeats": 3},
            "Qa": {"dataset": "squad", "hint": True, "same_article": False, "questions": 1},
        }.items()
    },
    "SweepCheckpoint": {"pretrained": "a"},
    "SweepRun": {"name": "x", "tasks": ["t"]},
    "Sweep": {"checkpoints": [{"pretrained": "a"}], "runs": [{"name": "x", "tasks": ["t"]}]},
    "DataSettings": {"folder": "f"},
    "Rule": {"task": "t", "largest_change": 0.1},
    "Policy": {"rules": [{"task": "t", "largest_change": 0.1}]},
    "OptimizationSettings": OPTIMIZATION,
    "TrainRecipe": {
        **{"name": "x", "model": {"training_length_tokens": 8}, "data": {"folder": "f"}},
        "optimization": OPTIMIZATION,
    },
    "Extension": {"checkpoint": "a", "data": "b", "context_tokens": 8, "optimization": OPTIMIZATION},
}


def models() -> list[type[Settings]]:
    for home in HOMES:
        importlib.import_module(home)
    options_classes()  # imports the task classes, beside which options may stand

    def below(kind: type[Settings]) -> Iterator[type[Settings]]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    # fields of an abstract one are those of its subclasses too
    ours = {kind for kind in below(Settings) if kind.__module__.startswith("sbeval.") and not inspect.isabstract(kind)}
    return sorted(ours, key=str)


FIELDS = [(kind, name) for kind in models() for name in kind.model_fields]
NUMBERS = st.booleans() | st.integers() | st.floats() | st.complex_numbers()
KEYS = st.text() | st.integers()
VALUES = st.recursive(
    NUMBERS | st.none() | st.text() | st.binary() | st.builds(object),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner),
    max_leaves=6,
)


def read(kind: type[Settings], **changes: Any) -> Settings:
    return kind.read({**REQUIRED.get(kind.__name__, {}), **changes}, place="the place", source="the source")


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_every_setting_is_explained_and_none_can_be_changed(kind: type[Settings]) -> None:
    found = read(kind)
    for name, field in kind.model_fields.items():
        assert field.description, name
        with pytest.raises(ValidationError, match="frozen"):
            setattr(found, name, None)


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_what_no_setting_can_be_is_a_sentence_that_names_it(kind: type[Settings]) -> None:
    for name in kind.model_fields:
        for value in (object(), [object()], b"8", 1j):
            found = rf"found \[?{re.escape(repr(value).strip('[]'))}\]?"
            with pytest.raises(UserError, match=rf"^Expected {name}\b.* of the place to be .*{found}: .*the source"):
                read(kind, **{name: value})


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FIELDS), VALUES)
def test_any_value_at_all_is_taken_or_is_one_sentence(field: tuple[type[Settings], str], value: Any) -> None:
    kind, name = field
    for given_value in (value, [value], {name: value}):
        try:
            read(kind, **{name: given_value})
        except UserError as error:
            text = str(error)
            assert re.search("xpected|rope_scaling|: [a-z`]", text), text
            assert len(text.splitlines()) == 1, text
            assert "pydantic" not in text, text
            assert "validation error" not in text, text


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_a_number_in_quotes_is_that_number_and_true_is_none(kind: type[Settings]) -> None:
    for name in kind.model_fields:
        try:
            expected = getattr(read(kind, **{name: 64}), name)
        except UserError:
            continue
        assert getattr(read(kind, **{name: "64"}), name) == expected
        with pytest.raises(UserError, match=rf"^Expected {name} of the place to be .*, found True: correct it in the"):
            read(kind, **{name: True})


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_an_unknown_key_is_answered_with_the_one_meant_or_with_all(kind: type[Settings]) -> None:
    name = max(kind.model_fields, key=len)
    with pytest.raises(UserError, match=f"keys that the place has, found unknown key '{name}s' in the source: did you"):
        read(kind, **{f"{name}s": 1})
    with pytest.raises(UserError, match=f"found unknown key 'zzz' in the source: known keys: .*{name}"):
        read(kind, zzz=1)


@pytest.mark.parametrize("kind", [kind for kind in models() if kind.__name__ in REQUIRED], ids=str)
def test_a_missing_key_is_named(kind: type[Settings]) -> None:
    for name, field in kind.model_fields.items():
        if field.is_required():
            rest = {key: value for key, value in REQUIRED[kind.__name__].items() if key != name}
            with pytest.raises(UserError, match=f"^Expected {name} of the place, found none: add it in the source.$"):
                kind.read(rest, place="the place", source="the source")


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_settings_made_in_code_are_checked_alike(kind: type[Settings]) -> None:
    for wrong in ({"zzz": 1}, {next(iter(kind.model_fields)): object()}):
        with pytest.raises(UserError, match=r"^Expected"):
            kind(**{**REQUIRED.get(kind.__name__, {}), **wrong})


def test_what_is_no_mapping_is_named_a_number_too_large_told_the_largest_and_a_long_value_shown_in_part() -> None:
    with pytest.raises(UserError, match=r"Expected run 'x' to be a mapping of settings, found \[1\]: write `key: val"):
        TaskOptions.read([1], place="run 'x'", source="sweep.yaml")
    with pytest.raises(UserError, match="whole numbers from 1 to 134217728, found 268435456"):
        read_value(Counts, 2**28, name="counts")
    with pytest.raises(UserError, match=r"found \[-1, -1, .* \.\.\.: correct it in") as error:
        TaskOptions.read({"context_lengths": [-1] * 10_000}, place="t", source="--metadata")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("written", [[64, 8], "64, 8", ["8", 64, "64"], (8, 64)])
def test_lengths_are_ascending_and_each_once_however_they_are_written(written: Any) -> None:
    assert as_counts(written) == read_value(Lengths, written, name="--context-lengths") == (8, 64)


def test_a_file_of_settings_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("a: [")
    for name, words in (("none.yaml", "which cannot be read"), ("s.yaml", "is not valid YAML")):
        with pytest.raises(UserError, match=words) as error:
            read_yaml(tmp_path / name, "a recipe")
        assert name in str(error.value)


def test_seeds_are_those_of_published_numbers() -> None:
    defaults = {kind.__name__: kind.model_fields["seed"].default for kind in models() if "seed" in kind.model_fields}
    assert (PERPLEXITY_SEED, SAMPLES_SEED, defaults["PerplexityOptions"]) == (1234, 42, PERPLEXITY_SEED)
    ruler = ("NiahOptions", "VtOptions", "CweOptions", "FweOptions", "QaOptions", "MqrarOptions", "FlipFlopOptions")
    assert {defaults[name] for name in ruler} == {SAMPLES_SEED}


@pytest.mark.parametrize("kind", [LocalPath, PathText], ids=["path", "text"])
def test_an_empty_path_is_not_the_working_folder(kind: Any) -> None:
    with pytest.raises(UserError, match="Expected data_path to be a path, found ''"):
        read_value(kind | None, "", name="data_path")
    assert str(read_value(kind | None, ".", name="data_path")) == "."
