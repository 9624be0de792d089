"""One harness for CPU and GPU: ``python -m benchmarks`` compares opfuse with its peers."""
