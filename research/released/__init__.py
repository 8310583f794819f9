"""The paper's released 3B checkpoint, which was not available here: runs, and the comparison with the paper.

- `sweep.yaml`: perplexity to 64K, RULER and the paper's suites
- `compare`: does what was measured agree with the paper's tables?
"""
