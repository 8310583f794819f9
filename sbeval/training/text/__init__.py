"""Training text: where it comes from, what is kept out of it, and its tokenizer."""
