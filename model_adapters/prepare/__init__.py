"""Step 2 of 4, prepare: makes a loaded model faster, for example by fused kernels, without changing its logits.

Each change replaces submodules, forwards or functions of the model. A change that moves the logits further than
rounding explains is undone.

`prepare` takes the model, the tokenizer and the `Setting` of an `Opened`, changes the model in place and returns a
`Prepared`. The step after this one is the self-test, which makes a `Session` of it.

- `prepared`: `prepare`, and `CHANGES`, the list of all changes with the reasons for their order
- `change`: `Change`, one change to a model, and `Setting`, the facts that decide whether a run makes it
- `changes`: the changes, one in each file
- `trial`: compares the model's logits before and after the changes, and undoes those that move the logits
- `sample`: token ids of ordinary text for such comparisons
- `replacing`: replaces and restores modules, forwards, global names and attributes
- `spread`: pipeline placement, with layers on several GPUs that compute different windows at the same time

Decisions:

- A change replaces submodules such as norms and MLPs, never the forward of the whole model. So it works for every
  architecture with such a submodule. A new change is one file in `changes` and one line in `CHANGES`.
- The logits of the whole model decide whether a change stays: `trial` reads 64 tokens before and after the changes. The
  limit for the difference is measured on the model, because rounding errors grow with depth.
- The comparison uses ordinary text. Low token ids are special tokens, whose logits moved 40 times as far in bf16.
- Some faults do not show in 64 tokens, such as those in experts or in attention to a sliding window. Changes of such
  submodules compare each of them with the original.
"""
