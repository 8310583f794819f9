"""Which numbers share an axis: one panel a corpus and protocol, split where models differ in several ways at once."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sbeval.reports.read.fields import LARGEST_NATS, length_text
from sbeval.reports.read.models import EvaluatedModel

PROTOCOL_ORDER = ("fixed_target", "stream", "sliding", "rolling")
PROTOCOL_WORDS = {
    "fixed_target": "The same target tokens at every length: a drop is what the extra context is worth.",
    "stream": "Joined documents in disjoint windows: shows whether a model breaks, not whether it uses context.",
    "sliding": "Joined documents in overlapping windows: every target has a long left context.",
    "rolling": "Each document alone, in windows of the given length: a document shorter than that changes no further.",
    "position": "One pass at the longest length.",
}
CORPUS_WORDS = {
    "text": "Text",
    "stdlib": "Python standard library",
    "wikitext": "WikiText-2",
    "pile": "The Pile",
    "pile_10k": "Pile 10K",
    "pg19": "PG-19 books",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Numbers on one axis.

    Attributes:
        corpus: name of the text.
        corpus_sha256: its hash, None where not recorded.
        protocol: how it was scored.
        aspect: what the models of a split panel differ in; empty for an undivided panel.
        tables: metric to its rows, only metrics that may share this axis.
        labels: models shown, in order.
        remarks: what a reader of this panel must know.
    """

    corpus: str
    corpus_sha256: str | None
    protocol: str
    aspect: str
    tables: dict[str, pd.DataFrame]
    labels: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def title(self) -> str:
        """Corpus, protocol and aspect as a heading."""
        words = CORPUS_WORDS.get(self.corpus, self.corpus)
        return f"{words}, {self.protocol.replace('_', ' ')}" + (f": by {self.aspect}" if self.aspect else "")

    @property
    def stem(self) -> str:
        """A file name without its ending; only letters, digits, `_` and `-`."""
        parts = [self.corpus, self.protocol, self.aspect, (self.corpus_sha256 or "")[:6]]
        return "-".join(safe_stem(part) for part in parts if part)


def safe_stem(value: str) -> str:
    """Turns any text into a harmless part of a file name."""
    harmless = (letter if letter.isascii() and (letter.isalnum() or letter in "_-") else " " for letter in value)
    return "_".join("".join(harmless).split())[:60] or "unnamed"


def perplexity_panels(measurements: pd.DataFrame, models: Sequence[EvaluatedModel]) -> list[Panel]:
    """Groups perplexity results into panels.

    Models with different tokenizers share an axis in bits per byte only. A panel whose models differ in more than one
    of position scheme, training length and window is split by these, each part holding the others fixed.
    """
    rows = measurements[(measurements["family"] == "perplexity") & measurements["context_length_tokens"].notna()]
    rows = rows[rows["protocol"] != "position"]
    panels: list[Panel] = []
    columns = ["corpus", "corpus_sha256", "protocol"]
    texts = rows[columns].astype(object).fillna("")
    for corpus, digest, protocol in dict.fromkeys(texts.itertuples(index=False, name=None)):
        part = rows[(texts == [corpus, digest, protocol]).all(axis=1)]
        shown = [model for model in models if model.label in set(part["setting"])]
        for aspect, members in _aspects(shown):
            labels = tuple(model.label for model in members)
            own = part[part["setting"].isin(labels)]
            tables, remarks = _tables(own)
            if tables:
                panels.append(
                    Panel(
                        corpus=corpus or "text",
                        corpus_sha256=digest or None,
                        protocol=protocol,
                        aspect=aspect,
                        tables=tables,
                        labels=labels,
                        remarks=tuple(remarks),
                    )
                )
    return sorted(panels, key=_panel_order)


def _panel_order(panel: Panel) -> tuple[str, str, int, str]:
    rank = PROTOCOL_ORDER.index(panel.protocol) if panel.protocol in PROTOCOL_ORDER else len(PROTOCOL_ORDER)
    return (panel.corpus, panel.corpus_sha256 or "", rank, "")


def _tables(rows: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], list[str]]:
    remarks = []
    tables = {str(metric): part for metric, part in rows.groupby("metric")}
    if "nll" in tables and "token_perplexity" not in tables:
        tables["token_perplexity"] = _perplexity(tables["nll"])
    kept = ["nll", "token_perplexity", "bits_per_byte"]
    if rows["tokenizer_sha256"].nunique(dropna=False) > 1:
        kept = ["bits_per_byte"]
        remarks.append("The models have different tokenizers, so only bits per byte are comparable.")
    if rows["bos"].nunique(dropna=True) > 1:
        remarks.append("The models' windows start differently (BOS policy); see the provenance.")
    if "nll" in kept and _targets_differ(tables.get("nll", rows)):
        remarks.append(
            "At some lengths the models were scored on different numbers of tokens (other longest lengths or limits), "
            "so small differences between their lines may come from the text."
        )
    longest = rows.groupby("setting")["targets_per_window"].max()
    if longest.nunique() > 1:
        remarks.append("The number of targets in a window differs between models.")
    return {metric: tables[metric] for metric in kept if metric in tables}, remarks


def _targets_differ(rows: pd.DataFrame) -> bool:
    return bool((rows.groupby("context_length_tokens")["tokens"].nunique() > 1).any())


def _perplexity(nll: pd.DataFrame) -> pd.DataFrame:
    table = nll.copy()
    table["metric"] = "token_perplexity"
    for column in ("value", "ci95_low", "ci95_high"):
        table[column] = np.exp(table[column].astype("float64").clip(upper=LARGEST_NATS))
    return table


def _aspects(models: Sequence[EvaluatedModel]) -> list[tuple[str, list[EvaluatedModel]]]:
    schemes = {(s.record.attention, str(s.record.rope_scaling), str(s.record.extrapolation)) for s in models}
    lengths = {_own_length(s) for s in models}
    windows = {s.record.sliding_window for s in models}
    if sum(len(values) > 1 for values in (schemes, lengths, windows)) < 2 or len(models) < 4:
        return [("", list(models))]
    full = [s for s in models if s.record.sliding_window is None]
    usual = Counter(_own_length(s) for s in full).most_common(1)
    length = usual[0][0] if usual else None
    by_scheme = [s for s in full if _own_length(s) == length]
    plain = [s for s in by_scheme if s.record.attention == "stickbreaking" and not _variant(s)]
    repeated = {s.record.attention for s in full if _own_length(s) != length}
    by_length = [s for s in full if s.record.attention in repeated or s in plain]
    windowed = [s for s in models if s.record.sliding_window is not None]
    schemes_windowed = {s.record.attention for s in windowed}
    by_window = [s for s in by_scheme if s.record.attention in schemes_windowed or s in plain] + windowed
    parts = [
        (f"position scheme, trained at {length_text(length)}" if length else "position scheme", by_scheme),
        ("training length", by_length if repeated else []),
        ("attention window", by_window if windowed else []),
    ]
    return [(aspect, members) for aspect, members in parts if len(members) > 1]


def _variant(model: EvaluatedModel) -> bool:
    return model.record.remainder not in (None, "none") or bool(model.record.head_norm)


def _own_length(model: EvaluatedModel) -> int | None:
    """The training length that tells models apart; a checkpoint and its extension count as one."""
    origin = model.record.extended_from or {}
    length = origin.get("length", origin.get("training_length_tokens"))
    return int(length) if isinstance(length, int) else model.record.training_length_tokens
