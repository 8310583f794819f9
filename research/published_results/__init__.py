"""Writes the pages of `docs/results` from their archives of result files."""
