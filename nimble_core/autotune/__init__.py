"""The measured choice among kernels and plans."""
