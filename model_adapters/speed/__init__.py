"""What makes a loaded model faster and knows nothing of lm-eval: kernels in place of its parts, and its caches."""
