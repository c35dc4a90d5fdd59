"""Diffusion models whose attention is split by sequence parallelism."""
