"""Activations, with a bias or with scales per row: their kernels, twins, and operations for graphs.

Importing this imports no Triton.
"""
