"""Measurements that decide how kernels are written, on a GPU and without any plugin."""
