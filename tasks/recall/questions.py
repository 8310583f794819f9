"""Loads data for retrieval tasks: pairs of a place in a needle and a word in its question, and LongBench v2."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.corpora import local_pairs
from sbeval.corpora.documents import MARK
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.content import cached_by_content
from sbeval.tasks.recall.labelled import local_splits
from sbeval.tasks.ruler.texts import load_from_hub
from sbeval.tasks.ruler.wording import long_bench_wording

_PLACES = (
    "the Eiffel Tower=France|the Colosseum=Italy|the Brandenburg Gate=Germany|the Acropolis=Greece|Big Ben=England|"
    "the Kremlin=Russia|the Taj Mahal=India|the Great Pyramid=Egypt|Mount Fuji=Japan|Machu Picchu=Peru|"
    "the Statue of Liberty=America|the Sagrada Familia=Spain|the Little Mermaid statue=Denmark|Angkor Wat=Cambodia|"
    "the Hagia Sophia=Turkey|the Forbidden City=China|the ruins of Petra=Jordan|Table Mountain=South Africa|"
    "the Blue Lagoon spa=Iceland|the Atomium=Belgium|the Charles Bridge=Czechia|the Anne Frank House=Netherlands|"
    "the Sydney Opera House=Australia|the Christ statue on Corcovado=Brazil|the Matterhorn=Switzerland|"
    "the Cliffs of Moher=Ireland|Borobudur temple=Indonesia|the Petronas Towers=Malaysia|Chichen Itza=Mexico|"
    "the CN Tower=Canada|the Marina Bay Sands hotel=Singapore|the Belem Tower=Portugal"
)
QUESTION = "Question: Who in this text has already visited {asked}?"
LETTERS = ("A", "B", "C", "D")
_STRATA = {"short": 32_000, "medium": 128_000}
"""Largest number of words in a "short" and in a "medium" text; longer texts are "long".

It is used for copies of LongBench v2 that do not state this category (stratum) of a question.
"""


def words(text: str) -> set[str]:
    """Returns the distinct words of a text in lower case."""
    return set(re.findall(r"\w+", text.lower()))


def needle(person: str, place: str) -> str:
    """Returns the needle, a sentence that says that a person lives beside a place."""
    return f"{person} lives beside {place}."


@cached_by_content(2)
def associations(path: str | None) -> tuple[Mapping[str, str], str]:
    """Returns a mapping from what a question asks about ("Australia") to what its needle shows, and a hash of it.

    Args:
        path: a .jsonl file with the fields "shown" and "asked"; None takes the packaged list.

    Raises:
        UserError: a needle shares a word with its question.
    """
    if path is None:
        listed = dict(pair.split("=")[::-1] for pair in _PLACES.split("|"))
    else:
        listed = {query: place for _, place, query in local_pairs(Path(local_path(path)), "shown", "asked")}
    for query, place in listed.items():
        if shared := words(needle("", place)) & words(QUESTION.format(asked=query)):
            expected = "Expected associations that share no word with their question"
            raise UserError(f"{expected}, found {sorted(shared)} in {place!r} and {query!r}: change one of the two.")
    return listed, hashlib.sha256(json.dumps(listed).encode()).hexdigest()


class Question(NamedTuple):
    """A question of LongBench v2: its text, question, choices, the right choice's letter, and its text length category.

    The category, `stratum`, is "short", "medium" or "long".
    """

    text: str
    question: str
    choices: Sequence[str]
    right: str
    stratum: str


@cached_by_content(2)
def load_questions(path: str | None) -> tuple[list[Question], str, str]:
    """Returns the questions of LongBench v2, their hash, and their source (a path, or the data set's id).

    Args:
        path: a local copy; None takes the data set of the hub.

    Raises:
        UserError: the data are missing or have another layout.
    """
    *_, dataset, configs = long_bench_wording()
    if path:
        tables = list(local_splits(path, "longbench2", "LongBench v2").values())
    else:
        tables = [load_from_hub("longbench2", "PATH", dataset, config)["train"] for config in configs]
    where = path or dataset
    try:
        questions = [_question(row) for table in tables for row in table]
    except (KeyError, IndexError, TypeError) as error:
        expected = f"Expected context, question, choices and answer in {where}"
        raise UserError(f"{expected}, found another layout ({error!r}): name a copy of LongBench v2.") from error
    digest = hashlib.sha256("\x1e".join(map(repr, questions)).encode("utf-8", "surrogatepass")).hexdigest()
    return questions, digest, where


def _question(row: Mapping[str, Any]) -> Question:
    """Converts a row in the layout of lm-eval's data set or of the authors' data set."""
    choices = row["choices"] if "choices" in row else [row[f"choice_{letter}"] for letter in LETTERS]
    answer = row["answer"]
    right = answer if answer in LETTERS else LETTERS[int(answer)]
    size = len(row["context"].split())
    stratum = row.get("length") or next((name for name, most in _STRATA.items() if size <= most), "long")
    return Question(
        row["context"].removeprefix(MARK), row["question"], [choices[i] for i in range(len(LETTERS))], right, stratum
    )
