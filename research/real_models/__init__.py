"""Released models that come by pip, measured past their training length.

- `checkpoints`: downloads such a model and writes it as a Hugging Face folder
- `texts`: writes the texts that are scored
- `evaluate`: NLL by length, untrained extension, RULER, recall, and evaluation after `sbeval extend`
"""
