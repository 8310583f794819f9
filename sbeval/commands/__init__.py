"""The command `sbeval`: what it offers, how it runs lm-eval, and how it ends, alone or in several processes.

- `cli`: which sub-commands are there, and what do they import?
- `options`: what is a run asked for, and what is wrong with that?
- `run`: how does `sbeval run` hand over to lm-eval's own command?
- `launch`: how are several processes of one evaluation started, and what is said when one fails?
- `ranks`: how do they end together?
- `ending`: how does a command end?
- `install_plugin`: how does an editable install get the line that registers the model with lm-eval?
"""
