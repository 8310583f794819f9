"""Perplexity of real text at each context length: one protocol a file.

- `task`: what do all protocols share?
- `rolling`: each document alone, as lm-eval cuts it
- `stream`: blocks of the joined text, with and without overlap, and by position in the longest window
- `fixed_target`: the same targets at every length
- `continuing`: which finished results in the output folder does a run with other lengths continue?
- `pairs`: a user's own targets, with their contexts and without
- `riffled`: a document's last piece, where others lie between its pieces
- `longppl`: which targets need their long context?
- `options`: what may a user choose?
- `inputs`: which corpus is read, what is fed before a window's first target, and how many positions has the model?
- `metrics`: how do answers become sums and metrics?
"""
