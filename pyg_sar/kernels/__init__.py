"""The operators: C++ kernels' Python face, and the same by PyTorch where they are missing."""
