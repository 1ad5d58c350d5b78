"""Sums over workers: of moments of node rows, of parameters' gradients."""

__all__: list[str] = []
