"""The experiments of Tan et al. 2025 at a scale that one machine trains in minutes.

- `extrapolation`: every position scheme, trained alike and evaluated far beyond its training length; context extension.
- `scheme_grid`: position schemes with several seeds, evaluated on NLL, needles, recall and riffled documents.
- `scheme_tables`: tables of these, with intervals over documents and seeds.
- `algorithm_data`, `algorithm_grid`: copy, reverse, sort and others, trained at 64 tokens and tested far beyond.
- `rivals`: what others do beyond the training length without other weights, on the same targets.
- `longrope_factors`: searches the factors that LongRoPE needs.
- `mqrar`: the associative recall of section 5.1.
- `job_queue`: runs many processes on the accelerators of one machine, and goes on where it was stopped.
"""
