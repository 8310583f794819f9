"""The command `sbeval` and its sub-commands.

- `cli`: the sub-commands and their options; each imports its package only when it runs
- `install_plugin`: writes the start-up line that registers the model with lm-eval, for an editable install

`sbeval --help` imports no torch.
"""
