"""Log-probabilities of chosen tokens, the requests tasks ask for them with, and how far attention looks back.

- `requests`: what do tasks ask of a model, and how do sequences travel?
- `scorer`: how are tokens scored without [length, vocabulary] logits?
- `logprob_kernel`: how is that one pass over the logits on a GPU?
- `spans`: how far back does every head look?
"""
