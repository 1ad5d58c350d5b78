"""Sparse matrices in torch's layouts, checked where they are made.

[Note: no check_invariants] PyTorch's ``check_invariants=True`` switches the check on for all
threads while a matrix is made, and of two calls that overlap one may leave it on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def coo_matrix(index: Tensor, entries: Tensor, size: Sequence[int], coalesced: bool) -> Tensor:
    """A matrix from rows and columns.

    Args:
        index: Rows and columns, ``[2, nnz]``.
        entries: Values, ``[nnz]``.
        size: Rows and columns of the matrix.
        coalesced: Entries are sorted and without duplicates.

    Raises:
        ValueError: When a row or column is out of range, or values are missing.
    """
    if entries.shape[:1] != index.shape[1:]:
        raise ValueError(f"expected a value for each of {index.size(1)} entries of the matrix")
    for name, place, bound in zip(("rows", "columns"), index, size, strict=True):
        _check_range(name, place, bound)
    return torch.sparse_coo_tensor(index, entries, tuple(size), is_coalesced=coalesced)


def _check_range(name: str, place: Tensor, bound: int) -> None:
    if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < bound:
        raise ValueError(
            f"expected {name} 0 to {bound - 1} of a sparse matrix (got {int(place.min())} to "
            f"{int(place.max())})"
        )


def check_compressed(matrix: Tensor) -> None:
    """Checks offsets: torch makes CSR and CSC matrices of any, and reads beyond their ends.

    Raises:
        ValueError: When they don't ascend from 0 to the number of entries.
    """
    if matrix.layout == torch.sparse_csr:
        offsets, entries, rows = matrix.crow_indices(), matrix.col_indices(), matrix.size(0)
    elif matrix.layout == torch.sparse_csc:
        offsets, entries, rows = matrix.ccol_indices(), matrix.row_indices(), matrix.size(1)
    else:
        return
    good = offsets.numel() == rows + 1 and entries.numel() == matrix.values().size(0)
    good = good and int(offsets[0]) == 0 and int(offsets[-1]) == entries.numel()
    if not good or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"expected the offsets of a sparse matrix to ascend from 0 to its {entries.numel()} "
            f"entries, {rows + 1} offsets in all"
        )


def compressed_rows(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row offsets, columns and values, ascending within each row and without duplicates.

    Args:
        matrix: In COO, CSR or CSC layout.

    Raises:
        ValueError: When a row or column is out of range.
    """
    check_compressed(matrix)
    coo = matrix.detach().to_sparse_coo()
    row, column = coo._indices()
    entries = coo._values()
    key = row * matrix.size(1) + column
    _check_range("rows", row, matrix.size(0))
    _check_range("columns", column, matrix.size(1))
    if bool((key[1:] <= key[:-1]).any()):  # to_sparse_coo() and is_coalesced() don't look.
        coo = coo_matrix(coo._indices(), entries, coo.shape, coalesced=False).coalesce()
        (row, column), entries = coo.indices(), coo.values()
    counts = torch.bincount(row, minlength=matrix.size(0))
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), column, entries


def matrix_of(
    crow: Tensor, column: Tensor, entries: Tensor, size: tuple[int, int], form: str
) -> Tensor:
    """The matrix that :func:`compressed_rows` took apart.

    Args:
        crow: Row offsets, ``[rows + 1]``.
        column: Columns, ``[nnz]``.
        entries: Values, ``[nnz]``.
        size: Rows and columns of the matrix.
        form: ``'sparse_coo'``, ``'sparse_csr'`` or ``'sparse_csc'``.

    Raises:
        ValueError: When offsets, columns and values don't make a matrix.
    """
    if int(crow[0]) != 0 or int(crow[-1]) != column.numel() or bool((crow.diff() < 0).any()):
        raise ValueError(f"expected row offsets of a sparse matrix from 0 to {column.numel()}")
    row = torch.repeat_interleave(torch.arange(size[0]), crow.diff())
    key = row * size[1] + column
    if bool((key[1:] <= key[:-1]).any()):
        raise ValueError("expected columns of a sparse matrix that ascend within each row")
    coo = coo_matrix(torch.stack([row, column]), entries, size, coalesced=True)
    if form == "sparse_coo":
        return coo
    matrix = torch.sparse_csr_tensor(crow, column, entries, size)
    return matrix.to_sparse_csc() if form == "sparse_csc" else matrix
