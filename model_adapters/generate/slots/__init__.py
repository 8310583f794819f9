"""Greedy generation of many texts side by side, each in a slot of one cache. On a GPU each decode step is a CUDA graph.

- `served`: lm-eval's greedy requests in slots, and which models and settings can be generated so
- `schedule`: which prompts are read and run when, in how many slots, and what happens when memory runs out
- `stepper`: a model and its slots on the device: prefill, and decode steps that add a token to each slot
- `recording`: decode steps recorded as CUDA graphs
- `fused_blocks`: a decode step of Llama-style blocks in few kernels
- `transformers_attention`: attention of transformers' models in a decode step
"""
