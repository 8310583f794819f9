"""`sbeval plan`: the smallest difference that so many documents or samples will show, and what they cost.

- `power`: the smallest difference that an interval shows, and the documents that a difference needs
- `report`: plans of tasks as text and JSON
- `command`: the command

Decisions:

- A difference counts as shown if its 95% confidence interval excludes zero. It is paired: both numbers are of the same
  documents or samples, as in reports. So its spread is the standard deviation of differences over documents, which is
  smaller than that of NLL itself.
- Spreads come from earlier results, or are stated. Those of earlier results are uncertain, above all if a few documents
  differ far more than the others. A planned difference has its power on average over what the spread may be, and the
  output says how far that holds in simulated runs.
"""
