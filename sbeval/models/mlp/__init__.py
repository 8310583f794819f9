"""What a block does to each position alone.

- `dense`: what is one MLP, and which activations are there?
- `experts`: how do tokens go through the experts that a router chose for them?
"""
