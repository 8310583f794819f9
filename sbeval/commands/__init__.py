"""The command `sbeval`: its sub-commands, and how `sbeval run` runs lm-eval.

- `cli`: which sub-commands are there, and what do they import?
- `options`: what is a run asked for, and what is wrong with that?
- `run`: how does `sbeval run` hand over to lm-eval's own command?
- `install_plugin`: how does an editable install get the line that registers the model with lm-eval?
"""
