"""lm-eval's command line: its options as this package reads and checks them, and its `run` in this process.

- `options`: what is a run asked for, and what is wrong with that?
- `run`: how does `sbeval run` hand over to lm-eval's own command?
"""
