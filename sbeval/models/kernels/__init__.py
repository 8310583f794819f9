"""Kernels of the models beside attention, and where they run."""
