"""Triton kernels for CUDA; on a CPU they run under Triton's interpreter (TRITON_INTERPRET=1)."""

from sbeval.attention.impl.triton.function import triton_attention

__all__ = ["triton_attention"]
