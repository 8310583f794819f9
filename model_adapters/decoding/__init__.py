"""Greedy generation of many texts side by side. On a GPU each step is a CUDA graph.

- `served`: lm-eval's greedy requests in slots; which models and settings can be, and why others cannot
- `texts`: prompts to tokens, and tokens to answers up to a stop sequence
- `thinking`: what a model may think before an answer, and how it is made to answer
- `schedule`: which prompts are read and run when, in how many slots, and what happens when memory runs out
- `stepper`: a model and its slots on the device: reads prompts, adds a token to each slot in a step, and hands them on
- `recording`: steps recorded as CUDA graphs
- `fused_blocks`: a step of Llama-style blocks in few kernels
- `growing_cache`: a key/value cache with room for new tokens, and attention without plans, for transformers' own loop
- `transformers_attention`: attention of transformers' models in a step
"""
