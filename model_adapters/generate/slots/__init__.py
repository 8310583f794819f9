"""Greedy generation with continuous batching: each text has a slot, which is one row of a static KV cache.

A text that is complete frees its slot for the next prompt. On a GPU a decode step is a CUDA graph.

- `served`: generates lm-eval's greedy requests in slots, and decides which models and settings this works for
- `schedule`: decides which prompts are prefilled when and in how many slots, and reacts when memory runs out
- `stepper`: a model and its slots on the device: prefills, and decode steps that add a token to each text
- `graph_capture`: captures decode steps as CUDA graphs
- `fused_blocks`: a decode step of Llama-style blocks in a few fused kernels
- `transformers_attention`: the attention function of transformers' models in a decode step

Decisions:

- A decode step needs nothing from the host: lengths, newest tokens and answers are on the device. So a step can be
  captured once and replayed. The host reads the new tokens after every 16 steps; if there are many texts, the next
  steps run meanwhile. It cuts an answer after the token that completes a stop sequence, as `hf` does for one text.
- Attention takes the length of each slot instead of a mask. A batch of prompts is right-padded, so that with causal
  attention no token sees the padding, and the padding is not copied into slots. The keys of a sliding window are a
  ring buffer. So an answer does not depend on the other texts, except for rounding.
- The prefill reads all tokens of a prompt but the last, which the first decode step reads.
- Each text has its own token budget and stop sequences, so requests of all tasks share the slots.
- If RoPE's frequencies depend on the text's length, only texts with equal frequencies share slots: a transformers model
  has one rotary embedding for all rows.
- On a CPU, and if a step cannot be captured, the same loop runs without graphs.
- If memory runs out in a step, texts keep their tokens and continue in half as many slots. No token is chosen twice.
- Each model is tried before it is used: a decode step in slots must give the logits of a forward pass over the whole
  text, for texts of two lengths.
"""
