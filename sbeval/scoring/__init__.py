"""Log-probabilities of chosen tokens, the requests tasks ask for them with, and how far attention looks back."""
