"""Graphs of a script that several workers run: they are partitioned, and kept in a cache.

[Note: the cache] Rank 0 partitions a graph into a folder that is named by a digest of the graph,
the number of parts and the format, so that the next run finds it. A graph whose transforms have
drawn random numbers is another one in each run: its folder is a temporary one.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch_geometric.data import Data, HeteroData

from pyg_sar.errors import DistributedIndexError, PartitionError
from pyg_sar.files import TemporaryFolder
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.partition.node_lists import is_named
from pyg_sar.partition.schema import VERSION
from pyg_sar.partition.storage import (
    merge_partitions,
    remove_partition,
    write_partitions,
)
from pyg_sar.partition.unfinished import add_to_digest
from pyg_sar.tensors import NodeTensor
from pyg_sar.tensors.rows import Writes
from pyg_sar.tools.script_together import Together

METHOD = "balanced"
"""The partitioner."""

Graph: TypeAlias = Data | HeteroData


@dataclass
class Graphs:
    """The graphs of a script at one rank, whose partitions are in the folder ``cache``.

    ``node_ids`` and ``levels`` are those of ``write_partitions``.
    """

    together: Together
    cache: Path
    node_ids: Mapping[str, bool] | None = None
    levels: Mapping[str, str] | None = None
    temporary: TemporaryFolder | None = None
    given: WeakKeyDictionary[Any, list[tuple[str, Writes, int]]] = field(
        default_factory=WeakKeyDictionary
    )

    def close(self) -> None:
        """Removes what is not kept."""
        if self.temporary is not None:
            self.temporary.close()

    def share(self, make: Any, name: str, dataset: Any = None) -> Any:
        """Returns the graph, or the tuple or list of graphs, that ``make()`` gives at rank 0,
        distributed.

        Collective. PyG's ``dataset`` may give the same tensors each time, with all that was written
        into them; here they are others, so a script that has written into them is refused.
        """
        if dataset is not None:
            self.check_unchanged(dataset, name)

        def work() -> Any:
            before = self.together.states()
            made = make()
            return self._written(made, self.together.states() == before, name)

        where = self.together.first(work)
        try:
            found = self._loaded(where)
        except PartitionError:
            # On all workers alike. What is in the cache was made by the same calls: once more.
            if not self.together.first(lambda: self._remove_damaged(where)):
                raise
            found = self._loaded(self.together.first(work))
        if dataset is not None:
            self.remember(dataset, found)
        return found

    def remember(self, dataset: Any, found: Any) -> None:
        """Notes what a dataset gives: of its tensors how often they were written."""
        known = self.given.setdefault(dataset, [])
        if isinstance(found, Data | HeteroData):
            values = [(name, value) for store in found.stores for name, value in store.items()]
            tensors = [(name, value) for name, value in values if isinstance(value, NodeTensor)]
            known += [(name, value.writes, value.writes.count) for name, value in tensors]

    def check_unchanged(self, dataset: Any, name: str) -> None:
        """Raises ``DistributedIndexError`` where what a dataset gave before was written since."""
        for attribute, writes, before in self.given.get(dataset, ()):
            if writes.count != before:
                raise DistributedIndexError(
                    f"{name} after {attribute!r} was written in place, which may be in what PyG's "
                    f"dataset gives again, and is not here (rank {self.together.comm.rank}): take "
                    "the graph once, or change dataset[0].clone()"
                )

    # At rank 0 ---------------------------------------------------------------

    def _written(self, made: Any, keep: bool, name: str) -> Any:
        """Partitions what was made, and returns where it is."""
        if isinstance(made, Data | HeteroData):
            return self._folder(made, keep, name)
        if isinstance(made, tuple | list):
            kind = "tuple" if isinstance(made, tuple) else "list"
            return {kind: [self._written(one, keep, name) for one in made]}
        raise TypeError(
            f"{name} gives a {type(made).__name__}; 'pyg-sar run' distributes Data and HeteroData"
        )

    def _folder(self, data: Graph, keep: bool, name: str) -> str:
        parts = self.together.comm.world_size
        found = hashlib.sha256()
        how = [VERSION, parts, METHOD, type(data).__name__, self.node_ids, self.levels]
        try:
            for value in (how, data.to_dict()):
                add_to_digest(found, value)
        except TypeError as error:
            raise DistributedIndexError(
                f"'pyg-sar run' can't tell what a {error} of a graph holds: leave the attribute "
                "out, or make it a tensor"
            ) from None
        folder = f"{found.hexdigest()[:32]}-{parts}"
        if keep:
            try:
                return self._partition(data, self.cache / folder, name)
            except FileExistsError:
                raise  # What lies there is not of a cache.
            except OSError as error:
                sys.stderr.write(
                    f"pyg-sar: this run alone has its partition: the cache '{self.cache}' can't be "
                    f"written ({error}); --cache DIR chooses another\n"
                )
        self.temporary = self.temporary or TemporaryFolder("pyg_sar-parts-")
        return self._partition(data, self.temporary.path / folder, name)

    def _partition(self, data: Graph, root: Path, name: str) -> str:
        """Partitions a graph, unless that was done before; returns the partition's folder."""
        try:
            read_metadata(root)
            return str(root)
        except PartitionError as error:
            problem = str(error)
        root.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(root):
            _remove(root, problem)
        lists = self.lists_in(data)
        levels = {k: level for k, level in (self.levels or {}).items() if k in data}
        parts = self.together.comm.world_size
        try:
            write_partitions(data, parts, root, METHOD, node_ids=lists, levels=levels)
        except FileExistsError:  # by another run, meanwhile
            read_metadata(root)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} can't be distributed: {error}") from error
        return str(root)

    def lists_in(self, data: Graph) -> dict[str, bool]:
        """Returns which attributes are lists of node ids; others may hold some, which stay global.

        A node tensor is indexed by global ids, so either is right; lists are divided.
        """
        names = [name for store in data.stores for name in store]
        kept = {name: False for name in names if not is_named(name)}
        return kept | {
            name: is_list for name, is_list in (self.node_ids or {}).items() if name in names
        }

    def _remove_damaged(self, where: Any) -> bool:
        """Removes partitions of the cache that can't be loaded; returns whether there was one."""
        if not isinstance(where, str):
            return sum(self._remove_damaged(one) for ones in where.values() for one in ones) > 0
        root, problem = Path(where), ""
        try:
            merge_partitions(root)
        except PartitionError as error:
            problem = str(error)
        if not problem or root.parent != self.cache:
            return False
        _remove(root, problem)
        return True

    # At all ------------------------------------------------------------------

    def _loaded(self, where: Any) -> Any:
        if isinstance(where, str):
            return load_partition(where)
        (kind, roots) = next(iter(where.items()))
        loaded = [self._loaded(root) for root in roots]
        return tuple(loaded) if kind == "tuple" else loaded


def default_cache() -> Path:
    """Returns the folder of the user's cache for partitions."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "pyg_sar" / "graphs"


def _remove(root: Path, problem: str) -> None:
    """Removes a partition that can't be loaded, and says so."""
    remove_partition(root)
    sys.stderr.write(f"pyg-sar: the graph is partitioned again: {problem}\n")
