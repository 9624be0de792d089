"""The Triton kernels of losses and log-probabilities, and their launches."""
