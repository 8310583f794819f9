"""Greedy generation of many texts side by side, a step of which is a CUDA graph where there is a GPU.

- `requests`: lm-eval's greedy requests in slots, where they are served
- `texts`: prompts to tokens, and tokens to answers
- `schedule`: which prompts run when, in how many slots, and what happens when memory runs out
- `together`: prompts longer than a batch, read by all processes of a group
- `prompts`: prompts read into free slots, many at once or one in pieces
- `stepper`: a model and its slots: prompts in, one token a slot and step out, all of it on the device
- `written`: what was written in slots, on its way to the host
- `recording`: steps recorded as CUDA graphs, where that can be done
- `fused_blocks`: a step of Llama-style blocks in few kernels
- `served`: what this can generate, and the reason where it cannot
- `transformers_attention`: attention of transformers' models in a step
- `stops`: where stop sequences end an answer
"""
