"""Experiments and studies that use sbeval; nothing here is imported by it or installed with it."""
