"""Released models that come by pip, measured past their training length.

- `checkpoints`: downloads such a model and writes it as a Hugging Face folder
- `texts`: writes the texts that are scored
- `evaluate`: NLL by length, untrained extension, windows, RULER, recall, and evaluation after `sbeval extend`
- `caches`: what quantized KV caches lose by length, with one prefill for all caches
- `archive`: packs results as a small file
- `page`: writes the tables of docs/results/smollm2
- `engines`: the same model by `hf`, `sb` and vLLM, every protocol in one table; `vllm_environment.sh` installs vLLM for
  CPUs
- `long_prompts`: log-probabilities of prompts up to 32K by vLLM's server, and its memory
- `served`: vLLM's server on a loopback port, and how many tokens each request to it has
"""
