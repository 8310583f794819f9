"""Step 4 of 4, score: from requests to windows of tokens, and from windows to log-probabilities.

`requests` has one function for each request type, which takes the `Session`. The generators that it calls yield
(index, scores).

- `requests`: each request type, from lm-eval's requests to their answers
- `windows`: the windows of tokens that requests ask for
- `schedule`: all windows in batches, longest first; the device computes the next batch while the host reads scores
- `batch`: one batch, which is started on the device and read later
- `prefixes`: inputs that share a prefix: the model reads the prefix once
- `nested`: windows that begin at the same token: only the longest is run
- `context_parallel`: long windows that all ranks of a group score together

In a causal model, the scores of a window's first tokens do not depend on later tokens, so `nested` and `prefixes` run
shared tokens once. If RoPE's frequencies depend on the input's length, this does not hold, and nothing is shared.
With `non_finite=null` windows are not nested either: NaN at a late position may spread through the whole window.

No request type needs to know the model's output head: `sbeval.scoring` runs the model's own forward with its body
replaced by hidden states that are computed already.
"""
