"""lm-eval's side of a model: `lm_eval --model sb`.

- `lm`: the model that lm-eval calls
- `options`: which arguments are the adapter's own?
- `loading`: how is a checkpoint loaded, and what if it does not load?
- `scoring`: how are lm-eval's scoring requests answered?
- `generation`: how is text generated up to a stop sequence?
- `probing`: how are targets inside sequences and attention spans answered?
- `windows`: how do requests become batches of windows?
- `batching`: how large is a batch, and what if memory runs out?
- `sharing`: what do requests share that begin alike?
- `truncation`: what happens to input that is too long?
- `rope`: which RoPE frequencies does a request get?
- `session`: how many tokens a second did a run take?
- `record`: what does the results file say of the model?
- `response_cache`: which kept answers belong to this run?
- `speed`: what makes a loaded model faster
"""
