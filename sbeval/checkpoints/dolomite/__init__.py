"""Reads checkpoints of dolomite-engine and of lm-engine, its successor.

- `tensors`: converts the tensors to those of an sbeval model
- `config`: reads config.json
- `layers`: reads the keys of config.json that describe single layers

Names of generations: A1 to A4 are flat configurations (one set of keys for all layers), C and C'' configurations with a
list of blocks.
"""
