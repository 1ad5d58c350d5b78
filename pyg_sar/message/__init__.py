"""A layer's message as a program, and what its backward pass needs."""
