"""What a section of the page is made of, before any HTML."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from sbeval.reports.figures.theme import Look
from sbeval.reports.write.html import Markup

Publish = Callable[[Mapping[str, Any], str], tuple[str, tuple[str, ...]]]
"""Writes a figure's image files under a name; returns the image's name and the links to the files."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of the page.

    Attributes:
        title: heading.
        finding: what it shows, in one sentence; also the text for readers who cannot see it.
        explanation: how to read it.
        variants: metric to its Vega-Lite specification.
        image: name of the first variant's still image, for paper and for pages without scripts.
        downloads: image files beside the page, as relative links.
        wide: True for a figure that takes the whole width.
        folded: True for a figure shown on request.
    """

    title: str
    finding: str
    explanation: str
    variants: Mapping[str, Mapping[str, Any]]
    image: str
    downloads: tuple[str, ...] = ()
    wide: bool = False
    folded: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section of the page.

    Attributes:
        identifier: anchor.
        title: heading.
        lead: one paragraph below it.
        drawings: its figures.
        metrics: metric to its name, for the switch; empty for no switch.
        legend: models with a button that hides their lines, and how they are drawn here.
        content: tables and text below the figures.
    """

    identifier: str
    title: str
    lead: str = ""
    figures: tuple[Figure, ...] = ()
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    legend: Mapping[str, Look] = dataclasses.field(default_factory=dict)
    content: tuple[Markup, ...] = ()
