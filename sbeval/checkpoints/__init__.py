"""Every checkpoint format this project reads, found by looking at the files."""

from sbeval.checkpoints.load import LoadedCheckpoint, load_checkpoint, training_length_tokens

__all__ = ["LoadedCheckpoint", "load_checkpoint", "training_length_tokens"]
