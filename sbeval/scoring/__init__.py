"""Log-probabilities of chosen tokens, the requests tasks ask for them with, and how far back attention looks.

- `requests`: what do tasks ask of a model, and how do sequences travel?
- `scorer`: how are tokens scored without [length, vocabulary] logits, and without waiting for a device?
- `body`: which part of a model computes hidden states, and how is it run apart?
- `context_parallel`: how do several processes score one window?
- `logprob_kernel`: how is that one pass over the logits on a GPU?
- `non_finite`: what if a model's logits are no numbers, and what do lm-eval's tasks record then?
- `returned`: which answers of a server that scores prompts can be right?
- `guarded`: how does every model of lm-eval that asks a server compare its answers with that?
- `rounding`: how far do logits lie apart, and how far does rounding alone move them?
- `spans`: how far back does every head look?
"""
