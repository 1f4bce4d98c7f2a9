"""Benchmark of the kernels against what the memory system allows: ``python -m aspire_kernels.bench --out
FILE.json``."""
