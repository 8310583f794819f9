"""lm-eval's command line: its options as this package reads and checks them, and its `run` in this process.

- `options`: reads and checks lm-eval's options and its `--config` file
- `run`: `sbeval run`, which calls lm-eval's own `run` command

Decisions:

- `sbeval run` is `lm_eval run`. lm-eval's own parser reads the options, so there is no second set of options. Defaults
  are added: the model `sb`, `--log_samples` with an output path, `max_length`, and the batch size "auto".
- Names, paths, types and lengths are checked before lm-eval imports torch. The packaged YAML files are read for that
  without lm-eval, and a sweep's dry run does the same checks. If a run needs none of lm-eval's own tasks, its 14,000
  files are not read.
"""
