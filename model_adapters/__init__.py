"""lm-eval's side of a model: the model `sb`, from its arguments to its answers.

The model, and what it is asked:

- `lm`: `StickBreakingLM`, the class lm-eval makes: loads in `hf`'s place, and hands every request to a function below
- `session`: what every request needs
- `scoring`: log-likelihoods of lm-eval's requests, windows and targets of our own tasks, and attention spans
- `generation`: prompts in, text up to a stop sequence out
- `decoding`: greedy generation side by side, with CUDA graphs
- `any_model`: the same requests, for lm-eval's other models that score tokens: in pieces, since sums come back
- `backend`: such a model, counted at every answer, described and kept
- `answers`: what those have in common: answers kept in the response cache as they come, given back in order

Between a request and the model:

- `truncation`: what happens to prompts and contexts that are too long
- `scored`: windows of tokens to scores, in batches, the next of which runs while the scores of one are read
- `sharing`: inputs that begin alike, read once
- `batching`: batches by token budget, halved when memory runs out
- `rope`: RoPE's frequencies and extrapolation for each request
- `prepare`: changes to a loaded model, such as kernels in place of its parts, that must not move its logits
- `self_test`: in which ways another project's model may be run, decided before its first answer

Before and after a run:

- `options`: the adapter's own arguments
- `loading`: released formats in transformers' place, sentences for what cannot be loaded, and chat templates
- `record`: what answers rest on: the model's record in the results file, and the stamp of the response cache
"""
