"""One file a section of the page: figures, sentences and tables, before any file exists.

- `section`: what is a section made of, and from what?
- `curves`: perplexity against context length
- `differences`: what the same targets gain or lose beyond the training length
- `steps`: checkpoints of one training, over its steps
- `positions`: NLL by position
- `ruler`: RULER against length
- `needles`: needle heatmaps
- `recall`: recall probes
- `spans`: attention spans
- `numbers`: one number for each curve
- `inputs`: ordinary tasks at several input lengths
- `samples`: single documents and answers
- `tables`: ordinary tasks and the paper's tables
- `runs`: what each run cost, and where every number comes from
"""
