"""The command `sbeval` and its sub-commands.

- `cli`: which sub-commands are there, and what do they import?
- `install_plugin`: how does an editable install get the line that registers the model with lm-eval?
"""
