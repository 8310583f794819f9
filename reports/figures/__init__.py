"""Figures as pure functions of a table: each returns one Vega-Lite specification for the page and the image files.

- `theme`: colours, shapes and type
- `lines`: what do all curves have in common?
- `annotations`: what explains a line?
- `labels`: where do names at the ends of lines go?
- `curves`: a metric against context length
- `positions`: NLL by position
- `scores`: a score against length or pairs
- `heatmaps`: needles by depth and length
- `spans`: attention spans by layer and head
- `render`: how do pictures and scripts come about offline?
- `drawing_process`: what runs in a process that draws?
"""
