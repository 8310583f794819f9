"""The JSON schema of the results contract: the committed file is what the records say, and real results fit it."""

import json
from pathlib import Path

import jsonschema
import pytest
from source_tree import ROOT

from sbeval.demo.extension import unpack
from sbeval.results.schema import FIELDS_OF, fields_of, results_schema

SCHEMA_FILE = ROOT / "docs" / "reference" / "results.schema.json"


def test_the_committed_schema_is_the_one_of_the_records() -> None:
    written = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert written == results_schema(), f"python -m sbeval.results.schema > {SCHEMA_FILE.relative_to(ROOT)}"


def test_every_field_has_a_meaning() -> None:
    assert all(field.meaning and field.kind for record in FIELDS_OF for field in fields_of(record))


def test_shipped_results_fit_and_a_wrong_kind_does_not(tmp_path: Path) -> None:
    files = [*unpack(tmp_path).rglob("results_*.json")]
    validator = jsonschema.Draft202012Validator(results_schema())
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert contents
    for content in contents:
        validator.validate(content)
    contents[0]["config"]["sbeval"]["parameters"] = "many"
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(contents[0])
