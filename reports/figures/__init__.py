"""Builders of figures that several kinds of measurement share.

Each figure is one Vega-Lite specification. The page shows it live, and the image files are rendered from it.

- `theme`: colours, marker shapes and fonts
- `lengths`: the length axis, in tokens or in multiples of each model's training or declared length
- `heatmaps`: heat maps over context length, one grid for each model
- `lines`: line plots against context length, single or as small multiples
- `labels`: captions, tooltips, reference lines, and model names at the ends of lines
- `images`: SVG, PNG and PDF files, and the page's script, both made offline
- `image_process`: the worker process that renders images

An axis in multiples of the training or declared length needs no second specification. Each row holds its place on every
axis, and `usermeta` of the specification holds the axis itself. The page's script (`onAxis`) and `lengths.on_axis` swap
the two in the same way.

A figure for a paper is the page's figure, smaller. Its plots are widened until the whole figure is 1.75 times as wide
as on paper, and the image is scaled by that factor. Letters, lines and markers keep their proportions, and letters have
7 points in every figure.

Names at the ends of lines are placed in Python for image files. The live page places them again, because only it knows
the width of the letters and which lines are hidden.

Rendering takes most of a report's time and does not release Python's GIL. It therefore runs in worker processes. A
worker runs a single file that imports only the drawing library, so that it starts fast.
"""
