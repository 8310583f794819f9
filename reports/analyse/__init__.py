"""From rows to what may be said about them.

- `statistics`: which simultaneous intervals do paired differences have?
- `selection`: which models and tasks are shown, and which is the baseline?
- `seeds`: which checkpoints differ in their training seed alone?
- `panels`: which numbers share an axis?
- `positions`: how does NLL differ by position?
- `claims`: does more context help?
- `caveats`: what must a reader know about all claims?
- `findings`: what is the summary in words?
- `overview`: what do all models show side by side?
- `paired`: how do two models differ on the same samples?
- `compare_scores`: the same for `sbeval compare`
- `suite`: how do ordinary tasks compare?
- `ruler`: what are RULER's averages and effective lengths?
- `needles`: how do scores depend on depth?
- `recall`: how does recall depend on pairs and length?
"""
