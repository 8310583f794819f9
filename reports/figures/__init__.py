"""Figures as pure functions of a table: each returns one Vega-Lite specification for the page and the image files.

- `theme`: colours, shapes and type
- `lines`: what do all curves have in common?
- `small_multiples`: figures of lines side by side
- `labels`: what explains a line, and where do names at its end go?
- `curves`: a metric or a score against context length
- `steps`: NLL over training steps
- `differences`: NLL against the training length's own, in pairs
- `positions`: NLL by position
- `heatmaps`: needles by depth and length
- `attention`: what attention does with its weight, all models beside each other
- `spans`: attention spans by layer and head
- `images`: how do images and scripts come about offline?
- `image_process`: what runs in a process that draws?
"""
