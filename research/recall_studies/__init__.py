"""RULER, recall probes and spans of the shipped checkpoints: how they were run, and tables of what came out."""
