"""Windows and targets of this project's tasks, scored by any model of lm-eval that scores tokens (`TemplateLM`).

- `answering`: which pieces are asked for, in which calls, and how do sums become answers?
- `pieces`: how is a window asked for, where the sum over a continuation comes back?
- `backend`: how is such a model called, what does it take whole, and what is kept of its answers?
- `returned`: did it read the tokens it was sent, and score all of them?
- `described`: which model is it, for the results file and for the response cache?
"""
