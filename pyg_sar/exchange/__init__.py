"""Rows of other workers: the halo plan, how rows travel, which of them travel."""
