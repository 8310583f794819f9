"""Step 2 of 4, prepare: replaces parts of a loaded model by faster ones and undoes every change that moves its logits.

`prepare` takes the model, the tokenizer and the `Setting` of an `Opened`, changes the model in place and returns a
`Prepared`. The step after this one is the self-test, which makes a `Session` of it.

- `prepared`: `prepare`, and `CHANGES`, all changes in their order with the reason for that order
- `change`: `Change`, one change to a model, and `Setting`, the facts that decide whether a run makes it
- `changes`: the changes, one in each file
- `trial`: compares the logits of the changed model with those before, and undoes changes one by one
- `sample`: token ids of ordinary text for such comparisons
- `replacing`: how a module, a forward or a global name is replaced and restored
- `spread`: a model with layers on several GPUs, which work on different windows at the same time

Decisions:

- The forward of the model itself is never replaced, only parts of it. So a change works for every architecture that has
  such a part. A new change is one file in `changes` and one line in `CHANGES`.
- The whole model decides whether a change stays: `trial` reads 64 tokens before and after. Its limit comes from the
  model itself, because rounding errors grow with depth and differ from model to model.
- Ordinary text is compared because low token ids are special tokens. In bf16 their logits moved 40 times as far.
- Some faults do not show in 64 tokens: those of experts, and of attention to a sliding window. Changes of such parts
  compare each part with the original.
"""
