"""Kernels: what is computed over blocks of edges, one module each (:mod:`pyg_sar.engine.run`)."""
