"""Training of small models and context extension, on transformers' Trainer.

- `command`: which options do `sbeval train` and `sbeval extend` have?
- `train`: how does `sbeval train RECIPE` train a model?
- `extend`: how does `sbeval extend CKPT` continue training at a longer context?
- `own_text`: how is a user's own text tokenised into token arrays?
- `arrays`: which files do token arrays consist of, and how are they loaded?
- `tokenizer`: how is a small tokenizer trained and saved?
- `recipe`: which settings does a recipe have, and how is it read?
- `claim`: how does a run lock its output folder, and when does it refuse the folder?
- `run`: how does a run start, resume and write its final checkpoint?
- `watch`: the Trainer callback: loss curve, progress messages, time limit, non-finite losses
- `record`: which files record a run's loss curve and commands, and how is a full disk reported?
- `trainer`: in what does our Trainer differ from transformers' Trainer, and how are its states kept?
- `windows`: which tokens does each training step see?
- `losses`: how is the loss computed, with documents joined or masked from each other?
- `distributed`: how do several ranks train together (FSDP, context parallelism)?

`recipes/` holds the recipes that ship with the package. A *state* is a checkpoint that transformers' Trainer can resume
from; a run's *checkpoint* is the final Hugging Face folder.

- The tokens of an optimizer step depend only on the data, the seed and the step's number. Models trained with the same
  data and seed see the same tokens in the same order, and a resumed run continues exactly where it stopped.
- Learning rates are chosen without test text: `validation_tokens` at the end of the training text are kept out of
  training, and the candidate rates are compared by the loss on them, at the model's own training length.
- A user's text is tokenised once, into the cache folder, under a hash of text and tokenizer, so that two models trained
  on one text read the same file. Every twentieth document is held out even without `--report`: a run that is resumed
  with `--report` must have trained on the same tokens.
- Settings that cannot be trained are refused before the run locks its output folder and writes to it. If a run failed
  before its first state, other settings may use its folder.
- With FSDP, states and checkpoints hold full tensors, gathered on rank 0, so they do not depend on the number of ranks.
  accelerate shards only on accelerators; the tests make it accept two CPU ranks.
- A run overwrites a folder only if the folder's `run.json` has the same settings and data. It deletes only files whose
  names are names that a Trainer writes.
"""
