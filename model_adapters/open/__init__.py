"""Opens a model: from the arguments of `--model_args` to a loaded model with its tokenizer.

- `hf`: `OpeningLM`, lm-eval's `hf` with this project's loading in the hooks of its constructor; returns an `Opened`
- `opened`: `Opened`, the loaded model and the facts that later steps need of it
- `arguments`: checks of arguments, most of them before torch is imported
- `processes`: how this process finds the others of a run
- `tensor_plan`: which models and processes a tensor plan of transformers works for
- `weights`: arguments that a format does not take, tied weights, and NaN in weights
- `adapters`: PEFT adapters whose weights must all be read
- `tokenizer`: whether the tokenizer fits the model, and which tokens it adds to a text
- `errors`: failures of transformers, peft and tokenizers as one sentence
"""
