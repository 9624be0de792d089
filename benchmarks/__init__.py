"""One harness for CPU and GPU: ``python -m benchmarks`` measures opfuse and its peers side by side."""
