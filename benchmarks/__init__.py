"""One harness for CPU and GPU: ``python -m benchmarks`` measures opfuse beside its peers."""
