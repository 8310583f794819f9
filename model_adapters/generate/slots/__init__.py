"""Greedy generation of many texts side by side, each in a slot of one KV cache. On a GPU a decode step is a CUDA graph.

- `served`: generates lm-eval's greedy requests in slots; says which models and settings that works for
- `schedule`: which prompts are prefilled when, in how many slots, and what happens when memory runs out
- `stepper`: a model and its slots on the device: prefill, and decode steps that add a token to each text
- `graph_capture`: captures decode steps as CUDA graphs
- `fused_blocks`: a decode step of Llama-style blocks in few fused kernels
- `transformers_attention`: the attention of transformers' models in a decode step

Decisions:

- A decode step needs nothing from the host: lengths, newest tokens and answers are on the device. So a step can be
  captured once and replayed. The host looks at the tokens every 16 steps, while the next steps run if there are many
  texts, and cuts an answer after the token that completed a stop sequence, as `hf` does for one text.
- Attention reads the length of each slot instead of a mask. Prompts are padded on the right, which causal attention
  does not see, and slots hold no padding. A sliding window is a ring buffer. So an answer does not depend on the other
  texts, except for rounding.
- The prefill reads all but the last token of a prompt; the first decode step reads the last one.
- Each text has its own limits and stop sequences, so requests of all tasks share the slots.
- If RoPE's frequencies depend on the text's length, only texts with equal frequencies share slots: a transformers model
  has one rotary embedding for all rows.
- On a CPU, and where a step cannot be captured, the same loop runs without graphs.
- If memory runs out in a step, texts keep their tokens and go on in half as many slots, so no token is chosen twice.
- Which models work is found by trying: a step in slots must give the logits of whole texts, for two lengths.
"""
