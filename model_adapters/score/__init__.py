"""Scores texts: from requests to windows of tokens, and from windows to log-probabilities.

- `requests`: each request type, from the requests to their answers
- `windows`: the windows of tokens that requests ask for
- `schedule`: windows to scores, in batches that follow each other without waiting; yields (number, scores)
- `batch`: one batch, started on the device and read later
- `prefixes`: prefixes that inputs share, read once; yields (number, scores)
- `nested`: windows that begin at the same token, of which the longest is run
- `context_parallel`: long windows that all ranks of a group score together; yields (number, scores)
"""
