r"""pyg_sar: exact full-batch training of any PyTorch Geometric model on several workers.

A plugin for PyTorch Geometric with the sequential aggregation and rematerialization of SAR
(Mostafa, MLSys 2022): partition a graph, start workers, train an unmodified PyG model on all of it.

.. code-block:: python

    pyg_sar.write_partitions(data, 4, "parts")          # once

    pyg_sar.init()                                      # in each worker
    data = pyg_sar.load_partition("parts")
    model = pyg_sar.distribute(model)
    loss = F.cross_entropy(model(data.x, data.edge_index)[mask], data.y[mask])

Errors are in :mod:`pyg_sar.errors`; all other public names in the subpackages: ``comm``, ``space``,
``partition``, ``reduction``, ``tensors``, ``nn``, ``train``, ``tools``, and ``functional``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyg_sar import errors as errors
    from pyg_sar import functional as functional
    from pyg_sar.comm.group import init as init
    from pyg_sar.comm.launch import launch as launch
    from pyg_sar.comm.launch import run as run
    from pyg_sar.convert import distribute as distribute
    from pyg_sar.ledger import Ledger as Ledger
    from pyg_sar.nn import DistMessagePassing as DistMessagePassing
    from pyg_sar.partition.loading import load_partition as load_partition
    from pyg_sar.partition.scatter import scatter as scatter
    from pyg_sar.partition.storage import write_partitions as write_partitions
    from pyg_sar.policy import SARPolicy as SARPolicy
    from pyg_sar.tensors import from_local as from_local
    from pyg_sar.tensors.neighbors import edges as edges
    from pyg_sar.tools.inference import infer as infer
    from pyg_sar.tools.planning import plan as plan
    from pyg_sar.tools.verify import verify as verify
    from pyg_sar.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

# The module of each name. PyTorch is imported when a name is used for the first time, so that
# `pyg-sar --help` answers at once.
_MODULES = {
    "DistMessagePassing": "nn",
    "Ledger": "ledger",
    "SARPolicy": "policy",
    "Trainer": "train.trainer",
    "distribute": "convert",
    "edges": "tensors.neighbors",
    "from_local": "tensors",
    "infer": "tools.inference",
    "init": "comm.group",
    "launch": "comm.launch",
    "load_partition": "partition.loading",
    "plan": "tools.planning",
    "run": "comm.launch",
    "scatter": "partition.scatter",
    "verify": "tools.verify",
    "write_partitions": "partition.storage",
}
__all__ = [*_MODULES]
_SUBPACKAGES = (
    *("comm", "errors", "functional", "kernels", "nn", "partition", "reduction", "space", "store"),
    *("tensors", "tools", "train"),
)


def __getattr__(name: str) -> Any:
    """Imports the module of a public name, or a subpackage, when it is used for the first time."""
    if name in _MODULES:
        value = getattr(import_module(f"pyg_sar.{_MODULES[name]}"), name)
    elif name in _SUBPACKAGES:
        value = import_module(f"pyg_sar.{name}")
    else:
        raise AttributeError(f"module 'pyg_sar' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
