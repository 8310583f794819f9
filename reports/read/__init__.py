"""From results files to typed rows.

`files` finds them, `runs` reads one, `fields` reads one value; `models` groups runs by the model under test.
`measurements` lays single numbers out in the tidy table; `positions`, `spans` and `samples` are readers of what else
runs hold, with the way each is shown as one over training seeds (`rows`). `results` puts all of it together.
"""
