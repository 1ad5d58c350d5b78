"""The operators: C++ kernels' Python face, and the same by PyTorch where they are missing."""


class KernelWarning(UserWarning):
    """Kernels can't be used, and PyTorch stands in: same results, slower."""
