"""The training text of the demo's and the experiments' models, from pinned packages to token arrays.

- `prepare`: how do pinned packages become one file of training text?
- `corpus`: which source files of which packages are taken?
- `decontamination`: which of them share text with held-out text?
- `tokenised`: how does that file become token arrays?
- `recall_text`: how is text made in which numbers are given names and asked for again?
"""
