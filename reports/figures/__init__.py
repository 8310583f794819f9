"""Figures as pure functions of a table: each returns one Vega-Lite specification for the page and the image files."""
