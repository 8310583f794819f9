"""What a run records and how sure its numbers are.

- `records`: which fields do results files hold, and which command made them?
- `schema`: what do these fields mean, and which JSON schema have they?
- `intervals`: which interval does the cluster bootstrap give?
- `saving`: how do lm-eval's files appear whole?
- `digits`: with how many digits is a difference shown, and how is a time?
- `terminal`: what does a run print?
"""
