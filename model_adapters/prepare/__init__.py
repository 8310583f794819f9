"""Prepares a loaded model: faster parts in place of its own, each of which stays only if the logits stay.

- `prepared`: `prepare`, the one entry, and `CHANGES`, every change in its order
- `change`: a change, and the facts of a run that decide whether it is made
- `changes`: the changes, one a file
- `trial`: compares the changed model with itself, and undoes changes one by one
- `sample`: tokens of ordinary text for such comparisons
- `replacing`: how a part of a model is replaced and given back
- `spread`: layers on several GPUs that work at once
"""
