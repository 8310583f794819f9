"""From rows to what may be said about them.

- `statistics`: which simultaneous intervals do paired differences have?
- `selection`: which models, tasks and seeds are shown, and which model is the baseline?
- `protocols`: what do the numbers of a protocol allow to be said?
- `panels`: which numbers share an axis?
- `claims`: does more context help?
- `findings`: what is said of one model?
- `one_number`: what is one number for a whole curve?
- `overview`: what is said of all models together?
- `ruler`: what are RULER's averages and effective lengths?
- `suite`: how do ordinary tasks compare?
- `paired`: how do two models differ on the same samples?
"""
