"""The section "MRCR": scores of OpenAI's conversations by number of needles and length."""

import re

from sbeval.reports.analyse.left_out import unfit_sentence
from sbeval.reports.figures.labels import Caption
from sbeval.reports.kinds.answered.panels import Shown, metrics_figure, metrics_table, with_intervals
from sbeval.reports.read.fields import first_listed, length_text, quote_name
from sbeval.reports.read.results import LENGTH, records
from sbeval.reports.section import Kind, Material, Section

_PROTOCOL = re.compile(r"mrcr_(\d+)_needles")


def _section(material: Material) -> Section | None:
    """Builds the section; None if MRCR was not run."""
    rows = material.results.measurements
    rows = rows[(rows["family"] == "mrcr") & (rows["metric"] == "score") & rows[LENGTH].notna()]
    if rows.empty:
        return None
    # each number of needles is drawn as `metrics_figure` draws a metric
    counts = rows["protocol"].str.extract(_PROTOCOL, expand=False)
    shown = {count: Shown(title=f"{count} needles") for count in sorted(counts.dropna().unique(), key=int)}
    by_needles = with_intervals(rows.assign(metric=counts), shown)
    looks = material.looks_of(by_needles["setting"])
    sentences = []
    for label in looks:
        of_model = by_needles[by_needles["setting"] == label]
        longest = of_model[LENGTH].max()
        scores = [
            f"{row['value']:.0%} with {row['metric']} needles" for row in records(of_model[of_model[LENGTH] == longest])
        ]
        sentences.append(f"{quote_name(label)} at {length_text(int(longest))}: {', '.join(scores)}")
    title = "MRCR: score by number of needles"
    explanation = (
        "Similarity of answer and reply, 0 if the answer lacks the required beginning. A conversation counts at the "
        "shortest length that it fits, so lengths have different conversations."
    )
    caption = Caption(
        title=title,
        finding=first_listed(sentences),
        explanation=f"{explanation} {unfit_sentence(by_needles)}".strip(),
        subtitle="against context length (tokens, log scale)",
    )
    return Section(
        identifier="mrcr",
        title="MRCR",
        lead=(
            "Several requests in a conversation are equal, and the last message asks for the reply to one of them. "
            "Bands: 95% intervals over conversations."
        ),
        figures=(metrics_figure(material, by_needles, caption, shown, looks, "mrcr"),),
        legend=looks,
        tables=(metrics_table(by_needles, shown, list(looks), stem="mrcr", title=title, explanation=explanation),),
    )


MRCR = Kind(section=_section)
