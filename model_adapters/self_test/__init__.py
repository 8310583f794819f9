"""A few tens of tokens that decide, before the first answer, in which ways another project's model may be run.

- `testing`: `self_test`, for one process of several, and what is kept of it; which ways are used
- `measured`: how far each way's logits lie from those of whole texts, and how far rounding alone moves them
- `real`: a run's own batches, of which some rows are read again alone
- `outcome`: what was found and what is done, as limits of batches, a record, a sentence and a table
"""
