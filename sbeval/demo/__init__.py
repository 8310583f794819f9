"""What `make demo` evaluates and shows.

- `evaluation`: what is run on the two shipped checkpoints?
- `extension`: which stored results of context extension are shown?
"""
