"""Partitions: who owns which node, the files, and what a worker loads from them."""
