"""What a block does to each position alone.

- `dense`: what is one MLP, and which activations are there?
- `checks`: does what a configuration says of experts have a meaning?
- `experts`: how do tokens go through the experts that a router chose for them?
"""
