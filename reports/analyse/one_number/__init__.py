"""One number for a whole curve, with its interval.

- `areas`: what is the area under a curve over log length?
- `effective`: how far is more context known to lower NLL?
- `compared`: which of two models has the longer one?
- `models`: what are these numbers of every model?
"""
