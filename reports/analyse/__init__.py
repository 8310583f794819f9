"""From rows to what may be said about them.

`statistics` holds the intervals; `selection` chooses models, tasks and seeds; `panels` decides what shares an axis;
`claims`, `findings` and `overview` say what lengths show, of one model and of all. `ruler`, `recall`, `needles`,
`positions` and `suite` (ordinary tasks) are a kind of measurement each; `paired` and `compare_scores` compare samples.
"""
