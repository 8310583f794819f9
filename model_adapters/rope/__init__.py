"""Where RoPE puts the tokens of a request: set from its length and the run's settings, and gone when it is done.

- `request`: frequencies and extrapolation of a run, held for one request
- `extrapolation`: a method in the place of a loaded model's own attention
"""

from sbeval.model_adapters.rope.request import RequestRope

__all__ = ["RequestRope"]
