"""Tensors of the whole graph, of which each worker holds its rows."""

from pyg_sar.tensors import attention as attention
from pyg_sar.tensors import functions as functions
from pyg_sar.tensors import indexing as indexing
from pyg_sar.tensors import items as items
from pyg_sar.tensors import modules as modules
from pyg_sar.tensors import neighbors as neighbors
from pyg_sar.tensors import pointwise as pointwise
from pyg_sar.tensors import products as products
from pyg_sar.tensors import reductions as reductions
from pyg_sar.tensors import sparse as sparse
from pyg_sar.tensors import views as views
from pyg_sar.tensors.boundary import from_local, to_local
from pyg_sar.tensors.edges import Edges, NodeMatrix, adjacency, edge_tensor
from pyg_sar.tensors.node_tensor import FromLocal, NodeTensor, mapped, node_tensors, rows_at, whole
from pyg_sar.tensors.operands import wrap
from pyg_sar.tensors.rows import Rows, node_rows
from pyg_sar.tensors.sparse import edges_matrix, is_shared_matrix, whole_matrix

__all__ = [
    "Edges",
    "FromLocal",
    "NodeMatrix",
    "NodeTensor",
    "Rows",
    "adjacency",
    "edge_tensor",
    "edges_matrix",
    "from_local",
    "is_shared_matrix",
    "mapped",
    "node_rows",
    "node_tensors",
    "rows_at",
    "to_local",
    "whole",
    "whole_matrix",
    "wrap",
]
