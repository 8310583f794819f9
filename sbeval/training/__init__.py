"""Training of small models and context extension, on transformers' Trainer.

- `prepare` turns pinned packages into one small file of training text, `tokenised` that file into token arrays.
- `train` (`sbeval train RECIPE`) trains a model from a recipe; `recipes/` holds those that ship.
- `extend` (`sbeval extend CKPT`) continues training a checkpoint at a longer context.

Which tokens a step sees depends on the data, the seed and the step alone (`windows`), so models to be compared see the
same tokens in the same order, and a run that was stopped goes on as if it had not been.
"""
