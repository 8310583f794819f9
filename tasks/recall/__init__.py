"""Recall probes scored by one forward pass: MQRAR, its text form, and flip-flop."""
