"""Training of small models and context extension, on transformers' Trainer.

- `command`: which options do `sbeval train` and `sbeval extend` have?
- `train`: what does `sbeval train RECIPE` do?
- `extend`: what does `sbeval extend CKPT` do, and what does it start from?
- `own_text`: how does a person's own text become token arrays?
- `arrays`: what do token arrays hold?
- `tokenizer`: how is a small tokenizer trained and saved?
- `recipe`: what may a recipe say, and how is it read?
- `claim`: how does a run claim its folder?
- `run`: how does a run resume and finish?
- `watch`: what happens beside its steps?
- `record`: what does a run leave behind, and what if the disk is full?
- `trainer`: what differs from transformers' Trainer?
- `windows`: which tokens does a step see?
- `losses`: what is the loss, also where documents do not see each other?
- `distributed`: which processes train together?

Which tokens a step sees depends on the data, the seed and the step alone, so models to be compared see the same tokens
in the same order, and a run that was stopped resumes as if it had not been. `recipes/` holds the recipes that ship.
"""
