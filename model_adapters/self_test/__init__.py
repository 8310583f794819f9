"""Step 3 of 4, self-test: decides how a prepared model of transformers may be run, and makes the `Session`.

Some models of transformers answer wrongly in a padded batch, with a KV cache or with one attention implementation. No
list of them would stay true. So, before the first answer, about fifty tokens are run in every way that a run uses, and
the logits are compared with those of whole texts that are read alone without a cache. A way that fails is not used: the
`Session` gets tighter limits. Later, some rows of the run's own batches are read again alone. The steps after this one
are `score` and `generate`.

- `testing`: `begin` and `tested`: rank 0 runs the test for all ranks, and the outcome is saved for later runs
- `measured`: how far the logits of each way are from those of whole texts, and how far rounding alone moves them
- `real`: checks some rows of the run's own batches
- `outcome`: the outcome: limits for batches, a record, a sentence and a table

Decisions:

- A difference is a share of the spread of a position's logits, as a mean over positions, since rounding may send a
  single token to another expert.
- The limit comes from the model: three texts are read with the output of every module rounded once more, four times as
  coarsely as the dtype. If a way seems to differ, up to seven more such draws are made; sound models rarely need them.
  In fp32 about 1e-6 stands against 0.1 for a real fault. In bf16, a mixture of experts with random weights varies so
  much that smaller faults pass.
- Generation is tested through the call that generates, so every kind of cache is tested as it is used.
- A model that gives other logits when it reads the same text again has failed.
- A cache that does not count its tokens is never used with padding, even if rounding hides the fault.
- A padded batch that is right shows that unpadded batches and single texts are right, so a sound model needs about
  twenty short passes.
- The test runs when the model is loaded, because all ranks are at the same place then.
"""
