"""Step 1 of 4, open: from the arguments of `--model_args` to `Opened`, a loaded model with its tokenizer.

lm-eval's `hf` loads models in its constructor, which calls one hook each for the configuration, the tokenizer and the
weights. `OpeningLM` overrides these hooks. The step after this one is `prepare`, which takes the `Opened`.
- `hf`: `OpeningLM`, lm-eval's `hf` with this project's loading in the hooks of its constructor; returns an `Opened`
- `opened`: `Opened`, the loaded model and the facts that later steps need of it
- `arguments`: checks the arguments, most of them before torch is imported
- `processes`: how a rank finds the other ranks of a run
- `tensor_plan`: tensor parallelism (`tp_plan`): the models and numbers of ranks that it works for
- `weights`: arguments that a checkpoint format does not take, tied weights, and NaN in weights
- `adapters`: PEFT adapters; every one of their weights must be read
- `tokenizer`: whether the tokenizer fits the model, and which tokens it adds to a text
- `errors`: turns exceptions of transformers, peft and tokenizers into one-sentence errors
"""
