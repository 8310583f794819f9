"""RULER, recall probes and spans of the shipped checkpoints: scripts of the runs, and tables of their results."""
