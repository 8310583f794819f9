"""The fields of the records as a table and as a JSON schema, both made from `records.py`.

`python -m sbeval.results.schema` prints the schema, which lies in docs/reference/results.schema.json.
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
    """One field: its name, its type as Python writes it, and what its record's docstring says of it."""

    name: str
    kind: str
    meaning: str


def fields_of(record: type[TaskRecord] | type[ModelRecord]) -> list[RecordField]:
    """Returns the fields of a record in their order."""
    # `inspect.getdoc` takes the common indent away, so entries of a section are indented by four
    meanings = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(record) or "")}
    return [RecordField(field.name, _written(field.type), meanings[field.name]) for field in dataclasses.fields(record)]


def results_schema() -> dict[str, Any]:
    """Returns the JSON schema of what sbeval adds to lm-eval's results files.

    Fields and tasks of others are allowed everywhere, as readers keep what they do not know.
    """
    definitions = {}
    for record in FIELDS_OF:
        schema = TypeAdapter(record).json_schema()
        schema["description"] = (inspect.getdoc(record) or "").partition("\n")[0]
        for field in fields_of(record):
            schema["properties"][field.name] |= {"description": field.meaning}
        definitions[record.__name__] = schema
    of_task = {"properties": {"metadata": {"properties": {"sbeval": {"$ref": "#/$defs/TaskRecord"}}}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What sbeval adds to a results file of lm-eval",
        "type": "object",
        "properties": {
            "config": {"type": "object", "properties": {"sbeval": {"$ref": "#/$defs/ModelRecord"}}},
            "configs": {"type": "object", "additionalProperties": {"type": "object", **of_task}},
        },
        "$defs": definitions,
    }


def _written(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", ()) else str(kind)


if __name__ == "__main__":
    print(json.dumps(results_schema(), indent=2))
