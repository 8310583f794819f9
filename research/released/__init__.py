"""The paper's released 3B checkpoint, which nobody here could reach: what to run, and what to compare it with.

- `sweep.yaml`: perplexity to 64K, RULER and the paper's suites
- `compare`: does what was measured agree with the paper's tables?
"""
