"""Groups perplexity results into panels: the results that one figure of curves shows.

There is one panel for each text and perplexity protocol. It is split if its models differ in several properties.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from sbeval.reports.analyse.protocols import PROTOCOL_ORDER
from sbeval.reports.read.fields import LARGEST_NATS, display_name, length_text, ranked
from sbeval.reports.read.models import EvaluatedModel
from sbeval.results.records import IDENTICAL_TARGETS

_NAMES_AT_MOST = 3
CORPUS_NAMES = {
    "text": "Text",
    "stdlib": "Python standard library",
    "wikitext": "WikiText-2",
    "pile": "The Pile",
    "pile_10k": "Pile 10K",
    "pg19": "PG-19 books",
}


def text_name(corpus: str, protocol: str = "") -> str:
    """Returns a text's name, followed by the protocol if that scores identical targets and is not `fixed_target`."""
    name = CORPUS_NAMES.get(corpus, corpus)
    return f"{name}, {protocol}" if protocol in IDENTICAL_TARGETS[1:] else name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """The perplexity results that one figure of curves shows.

    Attributes:
        corpus: name of the text.
        corpus_sha256: hash of the text; None if it is not recorded.
        protocol: perplexity protocol.
        aspect: if a panel was split, the property in which the models of this part differ; else empty.
        tables: metric to its rows; only metrics in which these models can be compared.
        labels: labels of the models shown, in order.
        remarks: warnings for the reader of the figure.
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
        """The heading: name of the text, protocol, and the property in which the models differ if there is one."""
        name = CORPUS_NAMES.get(self.corpus, self.corpus)
        return f"{name}, {self.protocol.replace('_', ' ')}" + (f": by {self.aspect}" if self.aspect else "")

    @property
    def stem(self) -> str:
        """The figure's file name without extension; it has only letters, digits, `_` and `-`."""
        names = [self.corpus, self.protocol, self.aspect, (self.corpus_sha256 or "")[:6]]
        return "-".join(safe_stem(name) for name in names if name)


def safe_stem(value: str) -> str:
    """Turns a string into part of a file name: only ASCII letters, digits, `_` and `-`, at most 60 characters."""
    harmless = (letter if letter.isascii() and (letter.isalnum() or letter in "_-") else " " for letter in value)
    return "_".join("".join(harmless).split())[:60] or "unnamed"


def perplexity_panels(measurements: pd.DataFrame, models: Sequence[EvaluatedModel]) -> list[Panel]:
    """Groups perplexity results into panels.

    Models with different tokenizers are compared only in bits per byte. A panel of four models or more is split if they
    differ in at least two of these properties: position scheme, training length and attention window. Each part then
    shows models that differ in one of the properties and share the others.
    """
    rows = measurements[(measurements["family"] == "perplexity") & measurements["context_length_tokens"].notna()]
    rows = rows[rows["protocol"] != "position"]
    panels: list[Panel] = []
    columns = ["corpus", "corpus_sha256", "protocol"]
    texts = rows[columns].astype(object).fillna("")
    for corpus, digest, protocol in dict.fromkeys(texts.itertuples(index=False, name=None)):
        on_text = rows[(texts == [corpus, digest, protocol]).all(axis=1)]
        for aspect, members in _aspects([model for model in models if model.label in set(on_text["setting"])]):
            labels = tuple(model.label for model in members)
            tables, remarks = _tables(on_text[on_text["setting"].isin(labels)])
            tasks = set(on_text["task"])
            aside = [
                f"{member.label} at {lengths}"
                for member in members
                for task, text, lengths in member.left_aside
                if task in tasks and (text or "") == digest
            ]
            if aside:
                remarks.append(f"Not shown, since other targets were scored: {', '.join(aside)}.")
            remarks += [remark for member in members for remark in seen_text(member, digest or None)]
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
    panels.sort(key=lambda panel: ranked(panel.protocol, PROTOCOL_ORDER)[0])
    return sorted(panels, key=lambda panel: (panel.corpus, panel.corpus_sha256 or ""))


def seen_text(model: EvaluatedModel, corpus_sha256: str | None) -> list[str]:
    """Returns a warning if the model was trained on documents of the text that it was scored on; else an empty list."""
    records = [task.record for _, task in model.task_runs() if task.record is not None]
    seen = {name for r in records if r.corpus_sha256 == corpus_sha256 for name in r.seen_documents or ()}
    if not seen:
        return []
    first = sorted(seen)[:_NAMES_AT_MOST]
    more = len(seen) - _NAMES_AT_MOST
    names = ", ".join(map(display_name, first)) + (f" and {more} more" if more > 0 else "")
    trained_on_text = f"was trained on at least {len(seen)} of the documents ({names})"
    return [f"{model.label} {trained_on_text}, and may have memorised them."]


def _tables(rows: pd.DataFrame) -> tuple[dict[str, pd.DataFrame], list[str]]:
    remarks = []
    tables = {str(metric): of_metric for metric, of_metric in rows.groupby("metric")}
    if "nll" in tables and "token_perplexity" not in tables:
        tables["token_perplexity"] = _perplexity(tables["nll"])
    comparable = ["nll", "token_perplexity", "bits_per_byte"]
    if rows["tokenizer_sha256"].nunique(dropna=False) > 1:
        comparable = ["bits_per_byte"]
        remarks.append("The models have different tokenizers, so only bits per byte are comparable.")
        if not (rows["protocol"] == "rolling").all():
            remarks.append(
                "Each tokenizer cuts the text at other places, so the targets need not be the same text, and a "
                "difference may come from that. The protocol rolling scores the same text under every tokenizer."
            )
    if rows["bos"].nunique(dropna=True) > 1:
        remarks.append("The models' windows start differently (BOS policy); see the provenance.")
    scored = tables.get("nll", rows).groupby("context_length_tokens")["tokens"]
    if "nll" in comparable and ((scored.nunique() > 1).any() or rows["targets_sha256"].nunique() > 1):
        remarks.append(
            "The models were not all scored on the same targets (other longest lengths or limits), so small "
            "differences between their lines may come from the text."
        )
    if rows.groupby("setting")["targets_per_window"].max().nunique() > 1:
        remarks.append("The number of targets in a window differs between models.")
    return {metric: tables[metric] for metric in comparable if metric in tables}, remarks


def _perplexity(nll: pd.DataFrame) -> pd.DataFrame:
    table = nll.copy()
    table["metric"] = "token_perplexity"
    for column in ("value", "ci95_low", "ci95_high"):
        table[column] = np.exp(table[column].astype("float64").clip(upper=LARGEST_NATS))
    return table


def _aspects(models: Sequence[EvaluatedModel]) -> list[tuple[str, list[EvaluatedModel]]]:
    schemes = {(s.record.attention, str(s.record.rope_scaling), str(s.record.extrapolation)) for s in models}
    lengths = {s.origin_length_tokens for s in models}
    windows = {s.record.sliding_window for s in models}
    if sum(len(values) > 1 for values in (schemes, lengths, windows)) < 2 or len(models) < 4:
        return [("", list(models))]
    full = [s for s in models if s.record.sliding_window is None]
    usual = Counter(s.origin_length_tokens for s in full).most_common(1)
    length = usual[0][0] if usual else None
    by_scheme = [s for s in full if s.origin_length_tokens == length]
    unchanged = [s for s in by_scheme if s.record.remainder in (None, "none") and not s.record.head_norm]
    plain = [s for s in unchanged if s.record.attention == "stickbreaking"]
    repeated = {s.record.attention for s in full if s.origin_length_tokens != length}
    by_length = [s for s in full if s.record.attention in repeated or s in plain]
    windowed = [s for s in models if s.record.sliding_window is not None]
    schemes_windowed = {s.record.attention for s in windowed}
    by_window = [s for s in by_scheme if s.record.attention in schemes_windowed or s in plain] + windowed
    aspects = [
        (f"position scheme, trained at {length_text(length)}" if length else "position scheme", by_scheme),
        ("training length", by_length if repeated else []),
        ("attention window", by_window if windowed else []),
    ]
    return [(aspect, members) for aspect, members in aspects if len(members) > 1]
