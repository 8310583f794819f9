"""What a run records and how sure its numbers are.

- `records`: which fields do results files hold, and which command made them?
- `schema`: what do these fields mean, and which JSON schema have they?
- `intervals`: which interval does the cluster bootstrap give, and with how many digits is it shown?
- `saving`: how do lm-eval's files appear whole?
- `terminal`: what does a run print?
"""
