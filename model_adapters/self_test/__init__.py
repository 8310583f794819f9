"""Step 3 of 4, self-test: decides how a prepared model of transformers may be run, and makes the `Session`.

Some models of transformers give wrong logits in a padded batch, with a KV cache or with one of their attention
implementations. A fixed list of such models would soon be out of date. So, before the first request, the model reads
about fifty tokens in each way that the evaluation would use: in a batch, with padding, with a KV cache. The logits are
compared with the reference: the whole text in a batch of one, without padding and without a cache. A way whose logits
differ is not used, and the `Session` gets tighter batch limits. During the evaluation, some rows of its batches are
compared with the reference, too. The steps after this one are `score` and `generate`.

- `testing`: `begin` and `tested`: rank 0 runs the test for all ranks, and the outcome is saved for later runs
- `measured`: measures how far the logits of each way are from the reference, and how far rounding alone moves them
- `real`: checks some rows of the batches of the evaluation itself
- `through_cache`: tests a replaced KV cache (`cache=...`), and measures its bytes a token
- `outcome`: the result of the self-test as batch limits, as a JSON record, as a log sentence and as a table

Decisions:

- Differences of logits are relative: the norm of the difference at a position, divided by the norm of the reference
  logits minus their mean. The mean over positions is compared with a limit, because rounding may send a single token to
  another expert and change its logits much.
- The limit is measured on the model: it reads three texts while random errors, up to four times as large as rounding to
  the dtype makes, are added to the output of each module without submodules. If a way exceeds the limit, the errors are
  drawn again up to seven times, and the limit rises to the largest effect. Correct models rarely need that. In fp32 the
  effect is about 1e-6, and a real fault about 0.1. In bf16, a mixture of experts with random weights varies so much
  that faults smaller than its limit are not found.
- Generation is tested with the `generate` call of the evaluation, so every kind of cache is tested as it is used.
- A model that gives different logits when it reads the same text a second time has failed.
- A cache that does not count its tokens is never used with padding, even if the fault is smaller than the limit.
- If a padded batch is right, unpadded batches and single texts are right, too. So a correct model needs only about
  twenty short forward passes.
- The test runs right after the model is loaded, because all ranks of a tensor-parallel model must run it together.
"""
