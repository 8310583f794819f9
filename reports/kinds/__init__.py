"""One file a kind of measurement, or a part of the page: it reads, analyses, draws its figures and says its section.

- `curves`: perplexity against context length, and over the steps of one training
- `differences`: what the same targets gain or lose beyond the training length, and under two conditions
- `positions`: NLL by position
- `position_sums`: its bins, its sums by document, and paired bands over both
- `needed`: how much context the same targets need
- `maps`: NLL by position, by document and by checkpoint against context length
- `needles`: needles by depth and length
- `claimed`: one number for each curve; declared, training and effective lengths, a table for each model
- `ruler`: RULER against length
- `recall`: recall probes
- `spans`: attention spans, their means and those of every layer and head
- `answers`: single documents and answers
- `suite`: ordinary tasks side by side and by input length, and the paper's tables
- `runs`: what each run cost, where every number comes from, and what was left out
"""
