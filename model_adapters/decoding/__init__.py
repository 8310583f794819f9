"""Greedy generation of many texts side by side. On a GPU each step is a CUDA graph.

- `requests`: lm-eval's greedy requests, generated in slots
- `texts`: prompts to tokens, and tokens to answers
- `schedule`: which prompts run when, in how many slots, and what happens when memory runs out
- `together`: prompts longer than a batch, which all processes of a group read
- `prompts`: prompts read into free slots, many at once or one in pieces
- `stepper`: a model and its slots on the device: reads prompts, and adds a token to each slot in a step
- `written`: new tokens of all slots, on their way to the host
- `recording`: steps recorded as CUDA graphs
- `fused_blocks`: a step of Llama-style blocks in few kernels
- `served`: which models and requests can be generated in slots, and why others cannot
- `transformers_attention`: attention of transformers' models in a step
- `stops`: where stop sequences end an answer
"""
