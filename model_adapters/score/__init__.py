"""Step 4 of 4, score: turns requests into windows of tokens, and computes the log-probabilities of their targets.

A window is one input sequence of the model with the target tokens to score in it. `requests` has one function for each
request type; it takes the `Session` and returns the answers. The generators that it calls yield pairs: a window's index
or a request, and its scores. `Answers` puts them in order.

- `requests`: one function for each request type that scores; takes lm-eval's requests and returns their answers
- `windows`: builds the windows of tokens for requests
- `schedule`: scores all windows in batches, longest first; the device computes the next batch while the host reads
  the scores of the last one
- `batch`: starts the forward pass of one batch without waiting for the device, and reads its scores later
- `prefixes`: groups windows that share a prefix, and prefills the prefix once
- `nested`: finds windows that are prefixes of longer windows, so that only the longest is run
- `context_parallel`: splits each long window over the ranks of a context-parallel group

In a causal model, the scores of a window's first tokens do not depend on later tokens, so `nested` and `prefixes` run
shared tokens once. If RoPE's frequencies depend on the input's length, this does not hold, and nothing is shared.
With `non_finite=null`, `nested` is not used either: a NaN at a late position may spread through the whole window.

The code here works with any output head: `sbeval.scoring` calls the model's own forward on hidden states that were
computed before, so the model itself computes the logits.
"""
