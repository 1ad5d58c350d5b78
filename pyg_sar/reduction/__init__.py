"""Sums over workers of moments and of gradients of parameters; rows of all workers in one file."""

__all__: list[str] = []
