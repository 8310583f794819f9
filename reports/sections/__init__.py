"""One file a section of the page: what it draws, says and tabulates, before any HTML.

- `section`: what is a section made of?
- `curves`: perplexity against context length
- `positions`: NLL by position
- `ruler`: RULER against length
- `ruler_tables`: RULER's tables
- `needles`: needle heatmaps
- `recall`: recall probes
- `spans`: attention spans
- `inputs`: ordinary tasks at several input lengths
- `tables`: ordinary tasks and the paper's tables
- `speed`: what each run cost
- `provenance`: where every number comes from
"""
