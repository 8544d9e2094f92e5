"""What is said about residual connections, measured: `python -m benchmarks.claims`."""
