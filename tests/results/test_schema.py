"""The JSON schema of results files: the committed file matches the records, and real results validate."""

import json
from pathlib import Path

import jsonschema
import pytest
from source_tree import ROOT

from sbeval.demo.extension import unpack
from sbeval.results.records import recorded_command
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


def test_a_script_is_named_without_its_folder_a_module_as_python_runs_it_and_both_can_be_pasted_into_a_shell() -> None:
    arguments = ["/usr/bin/lm_eval", "--model_args", "pretrained=my models/x,max_batch_tokens=4096", "--tasks", "a,b"]
    expected = "lm_eval --model_args 'pretrained=my models/x,max_batch_tokens=4096' --tasks a,b"
    assert recorded_command(arguments) == expected
    assert recorded_command(["/lib/lm_eval/__main__.py", "--limit", "3"]) == "python -m lm_eval --limit 3"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model_args", "pretrained=x,token=SECRET,dtype=float32"],
        ["--hf_hub_log_args", "hub_repo=y,token=SECRET"],
        ["--hf-token", "SECRET"],
        ["--hf_token=SECRET"],
        ["--model_args", '{"pretrained": "x", "token": "SECRET"}'],
    ],
)
def test_secrets_are_not_kept(arguments: list[str]) -> None:
    command = recorded_command(["lm_eval", *arguments])
    assert "SECRET" not in command
    assert "***" in command


@pytest.mark.parametrize("argument", ["max_batch_tokens=64", "eos_token=</s>", "token_count=3", "monkey=1"])
def test_what_only_sounds_like_a_secret_is_kept(argument: str) -> None:
    assert argument.replace("</s>", "") in recorded_command(["lm_eval", argument]).replace("</s>", "")
