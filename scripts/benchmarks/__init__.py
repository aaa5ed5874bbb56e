"""What `scripts/benchmark.py` runs: one module a benchmark, and what they share."""
