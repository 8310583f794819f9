"""What figures of several kinds share; each is one Vega-Lite specification for the page and the image files.

- `theme`: colours, shapes and type
- `lengths`: in tokens, or in multiples of what each model was trained at or declares?
- `heatmaps`: cells over context length, one grid a model
- `lines`: numbers against context length, and what all lines have in common, alone or side by side
- `labels`: what explains a figure, and where do names at the ends of lines go?
- `images`: how do images and scripts come about offline?
- `image_process`: what runs in a process that draws?
"""
