"""Training text: where it comes from, what is kept out of it, and its tokenizer.

- `corpus`: which source files of which packages are taken?
- `decontamination`: which of them share text with held-out text?
- `recall_text`: how is text made in which numbers are given names and asked for again?
- `own_text`: how does a person's own text become token arrays?
- `arrays`: what do token arrays hold?
- `tokenizer`: how is the demo tokenizer trained, saved and used?
"""
