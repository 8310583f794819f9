"""The fields of the records as a table and as a JSON schema, both made from `records.py`.

`python -m sbeval.results.schema` prints the schema; docs/reference/results.schema.json holds its output.
"""

import dataclasses
import inspect
import json
import re
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from sbeval.results.records import ModelRecord, TaskRecord

FIELDS_OF: tuple[type[TaskRecord] | type[ModelRecord], ...] = (TaskRecord, ModelRecord)

_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


class RecordField(NamedTuple):
    """One field of a record: its name, its type as Python writes it, and its meaning from the record's docstring."""

    name: str
    kind: str
    meaning: str


def fields_of(record: type[TaskRecord] | type[ModelRecord]) -> list[RecordField]:
    """Returns the fields of a record in the order of their definition."""
    # `inspect.getdoc` removes the common indentation, so entries of a section are indented by four spaces
    meanings = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(record) or "")}
    fields = dataclasses.fields(record)
    return [RecordField(field.name, _type_text(field.type), meanings[field.name]) for field in fields]


def results_schema() -> dict[str, Any]:
    """Returns the JSON schema of the fields that sbeval adds to lm-eval's results files.

    Other fields and tasks are allowed everywhere, since readers keep fields that they do not know.
    """
    definitions = {}
    for record in FIELDS_OF:
        schema = TypeAdapter(record).json_schema()
        schema["description"] = (inspect.getdoc(record) or "").partition("\n")[0]
        for field in fields_of(record):
            schema["properties"][field.name] |= {"description": field.meaning}
        definitions[record.__name__] = schema
    task_schema = {"properties": {"metadata": {"properties": {"sbeval": {"$ref": "#/$defs/TaskRecord"}}}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What sbeval adds to a results file of lm-eval",
        "type": "object",
        "properties": {
            "config": {"type": "object", "properties": {"sbeval": {"$ref": "#/$defs/ModelRecord"}}},
            "configs": {"type": "object", "additionalProperties": {"type": "object", **task_schema}},
        },
        "$defs": definitions,
    }


def _type_text(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", ()) else str(kind)


if __name__ == "__main__":
    print(json.dumps(results_schema(), indent=2))
