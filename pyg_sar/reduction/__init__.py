"""Sums over workers: of values, of moments of node rows, of parameter gradients."""
