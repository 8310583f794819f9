"""Checkpoints of dolomite-engine and of lm-engine, its successor.

- `tensors`: how does one become a model of the family?
- `config`: what does its configuration say?
- `layers`: what does it say of each layer?
"""
