"""The Triton kernels. Importing this imports no Triton."""
