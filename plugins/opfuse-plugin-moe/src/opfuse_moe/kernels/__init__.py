"""The Triton kernels, their tiles, and their launches."""
