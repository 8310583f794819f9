"""Step 1 of 4, open: reads the arguments of `--model_args`, and loads a model with its tokenizer into an `Opened`.

lm-eval's `hf` loads a model in its constructor, which calls one method for the configuration, one for the tokenizer and
one for the weights. `OpeningLM` overrides these methods. The next step is `prepare`, which takes the `Opened`.
- `hf`: `OpeningLM`, a subclass of lm-eval's `hf` that loads as this project does; its `open` returns an `Opened`
- `opened`: `Opened`, the loaded model, its tokenizer and facts that later steps need
- `arguments`: checks the arguments, most of them before torch is imported
- `processes`: how a rank finds the other ranks of a run
- `tensor_plan`: checks which models and numbers of ranks tensor parallelism (`tp_plan`) works for
- `weights`: refuses arguments that a checkpoint format does not take, keeps tied weights, warns of NaN in weights
- `adapters`: checks that all weights of a PEFT adapter exist and are loaded into the model
- `tokenizer`: whether the tokenizer fits the model, and which tokens it adds to a text
- `errors`: turns exceptions of transformers, peft and tokenizers into one-sentence errors
"""
