"""Sampling from trained runs under sequence parallelism; `dbsp-infer` is the command."""
