"""Functions that build figures, used by several kinds of measurement.

Every figure is a Vega-Lite specification. The page draws it interactively, and image files are rendered from it.

- `theme`: colours, marker shapes and fonts
- `lengths`: the length axis, in tokens or in multiples of each model's training or declared length
- `heatmaps`: heat maps over context length, one grid for each model
- `lines`: line plots against context length, single or as small multiples
- `labels`: captions, tooltips, reference lines, and model names at the ends of lines
- `images`: renders SVG, PNG and PDF files, and bundles the page's drawing script; both work offline
- `image_process`: the worker process that renders images

One specification holds the length axis in tokens and in multiples of the training or declared length. Every data row
has a field with its position on each of these axes, and `usermeta` of the specification holds the definitions of the
axes. To switch the axis, the page's script (`onAxis`) and `lengths.on_axis` replace the field and the definition.

Figures for a paper are made from the specifications of the page. The plots are widened until the whole figure, in
pixels, is 1.75 times its width on paper in points, and the image is scaled down by that factor. Letters, lines and
markers keep their proportions, and letters have 7 points in every figure.

For image files, Python places the names at the ends of lines. The interactive page places them again, because only
there the widths of the letters and the hidden lines are known.

Rendering takes most of the time of a report and does not release Python's GIL. It therefore runs in worker processes. A
worker runs a single file that imports only the drawing library, so that it starts fast.
"""
