"""Training: the loop, its settings, checkpoints, reports."""
