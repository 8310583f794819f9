"""Documents of a dataset on the Hugging Face hub."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sbeval.corpora.documents import Corpus, Document, make_document
from sbeval.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class HubText:
    """Where a text column lies on the hub.

    Attributes:
        path: dataset such as "NeelNanda/pile-10k".
        config: configuration of the dataset, None for its only one.
        split: split to read.
        text_field: column that holds the text.
    """

    path: str
    config: str | None = None
    split: str = "test"
    text_field: str = "text"

    def rows(self) -> Iterator[str]:
        """Yields the column's texts in order, empty ones too."""
        import datasets

        try:
            table: Any = datasets.load_dataset(self.path, self.config, split=self.split)
        except Exception as error:  # the hub's client raises many unrelated classes when it cannot be reached
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"Expected the split {self.split!r} of {self.path!r} from the Hugging Face hub, found that it does not "
                f"load ({reason}): go online once, correct the name, or give local text with "
                '--metadata \'{"data_path": "..."}\'.'
            ) from error
        if self.text_field not in table.column_names:
            raise UserError(
                f"Expected a column {self.text_field!r} in {self.path!r}, found {table.column_names}: "
                'name the one that holds the text with --metadata \'{"text_field": "..."}\'.'
            )
        for row in table.select_columns([self.text_field]):
            yield row[self.text_field] or ""


def hub_corpus(source: HubText, *, name: str) -> Corpus:
    """Returns the documents of a hub dataset, one a row; rows without text are left out."""

    def documents() -> Iterator[Document]:
        for number, text in enumerate(source.rows()):
            if text.strip():
                yield make_document(f"{number:06d}", text)

    config = f"/{source.config}" if source.config else ""
    return Corpus(name=name, documents=documents, detail=f"{source.path}{config}:{source.split}")
