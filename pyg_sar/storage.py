"""The on-disk partition format: a folder of versioned JSON and one safetensors file per part.

.. code-block:: text

    root/metadata.json                       format, version, sizes, statistics, attributes, parts
    root/part-00000-of-00004.safetensors     memory mapped by the worker that owns it

The tensors of a part are those of ``parts.py``, or of ``hetero_parts.py`` for a heterogeneous
graph, and of its lists of node ids those of ``node_lists.py``. Versions 1 and 2, which had no
timetable, 3, which had no covers, and 4, which held node ids as they were, are still read.

[Note: a write is all or nothing] Everything goes to a temporary folder beside ``root``, the
metadata last; files and folders are flushed to the disk; then the folder is renamed. A folder
without its metadata does not load, so no interrupted write does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.attributes import Attribute
from pyg_sar.errors import PartitionError
from pyg_sar.hetero_partition import Assignment
from pyg_sar.hetero_parts import (
    HeteroSchema,
    merge_hetero,
    statistics_from_dict,
)
from pyg_sar.node_ids import NodeIds
from pyg_sar.node_lists import NodeList, merge_lists
from pyg_sar.partition import (
    PartitionStatistics,
)
from pyg_sar.parts import PartTensors, decode_attributes, merge_parts
from pyg_sar.prepare import FORMAT, VERSION, prepare_hetero, prepare_homogeneous

METADATA = "metadata.json"
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """One part's file: its name, checksum (SHA-256), size in bytes, and row counts."""

    file: str
    sha256: str
    bytes: int
    num_nodes: int
    num_edges: int
    num_halo: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionMetadata:
    """What ``metadata.json`` says about the whole partition."""

    root: Path
    version: int
    num_parts: int
    num_nodes: int
    num_edges: int
    is_directed: bool
    method: str
    seed: int
    statistics: PartitionStatistics
    attributes: dict[str, Attribute]
    values: dict[str, Any]
    parts: list[PartInfo]
    hetero: HeteroSchema | None = None
    num_graphs: int | None = None
    lists: list[NodeList] = field(default_factory=list)

    def check_world_size(self, world_size: int) -> None:
        """Raises :class:`PartitionError` unless there is one part per worker."""
        if world_size != self.num_parts:
            raise PartitionError(
                f"The partition '{self.root}' has {self.num_parts} parts, but there are "
                f"{world_size} workers; start {self.num_parts} workers or partition the graph "
                f"into {world_size} parts"
            )


# Writing #################################################################################


def write_partitions(
    data: Data | HeteroData,
    num_parts: int,
    root: str | os.PathLike[str],
    method: str | Tensor | np.ndarray[Any, Any] | Assignment = "metis",
    seed: int = 0,
    *,
    node_ids: NodeIds | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PartitionStatistics:
    """Partitions a graph and writes it to a folder, one file per part.

    Every node belongs to one part, every edge to the part of its target. Any ``Data`` or
    ``HeteroData`` will do: directed or not, with self loops, duplicate edges, isolated nodes,
    types without features or edges, relations without edges, and any node-, edge- or graph-level
    attributes, sparse ones included. The same arguments give the same bytes.

    Attributes that hold node ids are split to the nodes' owners: lists of them ``[K]``, such as
    ``train_idx`` or OGB's ``split_idx``, and pairs ``[2, K]``, such as ``edge_label_index``, with
    the attributes that have a row per entry (``edge_label``). Which these are PyG's convention
    tells: the name has 'index' in it, or 'idx'. On a part, a list holds local ids, and pairs are a
    distributed ``edge_index``; ``NAME_place`` says where in the whole list their entries stood.

    Args:
        data: The graph.
        num_parts: The number of parts; one per worker.
        root: The folder to write. It must not exist, or be empty, unless ``overwrite``.
        method: ``'metis'``, ``'metis-work'``, ``'random'``, ``'contiguous'``, or an integer vector
            ``[num_nodes]`` (see :func:`~pyg_sar.partition.assign_nodes`); of a ``HeteroData`` a
            dict of such vectors by node type
            (:func:`~pyg_sar.hetero_partition.assign_node_types`).
        seed: Seed of the partitioner.
        node_ids: Names of more attributes that hold node ids; or for each name whether it does,
            ``{'roots': True, 'cluster_idx': False}``. Of a dict of lists its name. ``False``
            keeps an attribute's values as they are.
        overwrite: Replace an existing partition at ``root``.
        progress: Called with a line of text before each stage.

    Returns:
        Edge cut, balance, halo rows and replication factor; ``print`` shows a table, of a
        ``HeteroData`` for each node type and relation too.

    Raises:
        ValueError: When an argument or an attribute of ``data`` can't be used, or may hold node
            ids (integers with no row per node or edge) and nothing says so.
        TypeError: When ``data`` is neither a ``Data`` nor a ``HeteroData``, or ``method`` does
            not fit it.
        FileExistsError: When ``root`` exists.
    """
    report = progress or (lambda text: None)
    root = Path(root)
    _check_target(root, overwrite)
    prepare = prepare_hetero if isinstance(data, HeteroData) else prepare_homogeneous
    header, statistics, tensors_of = prepare(data, num_parts, method, seed, report, node_ids)
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}.tmp-", dir=root.parent))
    try:
        parts = []
        for p in range(num_parts):
            report(f"writing part {p + 1} of {num_parts}")
            parts.append(_write_part(scratch, tensors_of(p), p, num_parts))
        _write_metadata(scratch, {**header, "parts": parts})
        _publish(scratch, root)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return statistics


def part_file(part: int, num_parts: int) -> str:
    """The file name of a part."""
    return f"part-{part:05d}-of-{num_parts:05d}.safetensors"


def _write_part(folder: Path, tensors: PartTensors, p: int, num_parts: int) -> dict[str, Any]:
    path = folder / part_file(p, num_parts)
    save_file(tensors, path)
    _flush(path)
    return {
        "file": path.name,
        "sha256": _sha256(path),
        "bytes": path.stat().st_size,
        "num_nodes": _count(tensors, "n_id"),
        "num_edges": _count(tensors, "e_id"),
        "num_halo": _count(tensors, "halo_n_id"),
    }


def _count(tensors: PartTensors, name: str) -> int:
    """Rows of the tensors of that name, of all node types or relations."""
    return sum(t.numel() for key, t in tensors.items() if key.rpartition("/")[2] == name)


def _write_metadata(folder: Path, content: dict[str, Any]) -> None:
    path = folder / METADATA
    content = {**content, "checksum": _content_checksum(content)}
    path.write_text(_dump(content))
    _flush(path)
    folder.chmod(0o777 & ~_umask())  # mkdtemp() gives the owner alone access.
    _flush(folder)


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _content_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(content).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_target(root: Path, overwrite: bool) -> None:
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"'{root}' exists; choose another folder or pass overwrite=True")
    if not (root / METADATA).is_file():
        raise FileExistsError(f"'{root}' is not a partition, so it is not overwritten; delete it")


def _publish(scratch: Path, root: Path) -> None:
    """Renames the finished folder to its place, and removes what it replaces."""
    old = None
    if root.exists() and any(root.iterdir()):
        old = scratch.with_name(scratch.name + "-old")
        root.rename(old)
    try:
        scratch.rename(root)
    except BaseException:
        if old is not None:
            old.rename(root)
        raise
    _flush(root.parent)
    if old is not None:
        shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Reading #################################################################################


def read_metadata(root: str | os.PathLike[str]) -> PartitionMetadata:
    """Reads and checks ``metadata.json``.

    Raises:
        PartitionError: When there is no partition, or it is damaged or too new.
    """
    root = Path(root)
    path = root / METADATA
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise PartitionError(
            f"'{root}' holds no partition ('{METADATA}' is missing); write one with "
            "pyg_sar.write_partitions or 'pyg-sar partition'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PartitionError(f"'{path}' can't be read: {error}") from error
    damaged = PartitionError(
        f"'{path}' is truncated or was altered; copy it again or partition the graph anew"
    )
    try:
        content = json.loads(text)
    except ValueError:
        raise damaged from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PartitionError(f"'{path}' does not describe a {FORMAT}")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise PartitionError(
            f"'{root}' has format version {version}, newer than {VERSION}, the newest known here; "
            "update pyg_sar"
        )
    if version not in range(1, VERSION + 1):
        raise PartitionError(
            f"'{root}' has format version {version!r}, which is not known here (1 to {VERSION}); "
            "partition the graph anew"
        )
    checksum = content.pop("checksum", None)
    if checksum != _content_checksum(content) or text != _dump({**content, "checksum": checksum}):
        raise damaged
    return _parse_metadata(root, content)


def _parse_metadata(root: Path, content: dict[str, Any]) -> PartitionMetadata:
    counts = {name: content[name] for name in ("num_parts", "num_nodes", "num_edges")}
    measured = {
        name: content["statistics"][name]
        for name in ("edge_cut", "nodes", "edges", "halo", "training_nodes")
    }
    statistics = PartitionStatistics(**counts, **measured)
    hetero = None
    if "hetero" in content:
        statistics = statistics_from_dict(counts, content["statistics"])
        hetero = HeteroSchema.from_dict(content["hetero"])
    return PartitionMetadata(
        root=root,
        version=content["version"],
        **counts,
        is_directed=content["is_directed"],
        method=content["method"],
        seed=content["seed"],
        statistics=statistics,
        attributes={name: Attribute(**row) for name, row in content["attributes"].items()},
        values=content["values"],
        parts=[PartInfo(**row) for row in content["parts"]],
        hetero=hetero,
        num_graphs=content.get("num_graphs"),
        lists=[NodeList.from_dict(row) for row in content.get("lists", {}).values()],
    )


def read_part(
    root: str | os.PathLike[str],
    part: int,
    *,
    verify: bool = True,
    metadata: PartitionMetadata | None = None,
) -> PartTensors:
    """Reads the tensors of one part, memory mapped; no other part's file is touched.

    Args:
        root: The partition folder.
        part: The part.
        verify: Compare the checksum, which reads the file once.
        metadata: What :func:`read_metadata` gave, to spare a second look.

    Raises:
        PartitionError: When the file is missing or damaged.
        ValueError: When there is no such part.
    """
    metadata = metadata or read_metadata(root)
    if not 0 <= part < metadata.num_parts:
        raise ValueError(
            f"Expected 'part' to be in 0 .. {metadata.num_parts - 1}, the parts of '{root}' "
            f"(got {part})"
        )
    info = metadata.parts[part]
    path = Path(root) / part_file(part, metadata.num_parts)
    remedy = "copy it again or partition the graph anew"
    if not path.is_file():
        raise PartitionError(f"'{path}', part {part} of '{root}', is missing; {remedy}")
    size = path.stat().st_size
    if size != info.bytes:
        raise PartitionError(f"'{path}' has {size} bytes instead of {info.bytes}; {remedy}")
    if verify and _sha256(path) != info.sha256:
        raise PartitionError(f"'{path}' was altered: its SHA-256 checksum differs; {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise PartitionError(f"'{path}' can't be read: {error}; {remedy}") from error


def part_attributes(metadata: PartitionMetadata, tensors: PartTensors) -> dict[str, Any]:
    """The attributes of a part as ``Data`` held them: ``{name: value}`` for this part's rows.

    Args:
        metadata: What :func:`read_metadata` gave.
        tensors: What :func:`read_part` gave.
    """
    return decode_attributes(metadata.attributes, metadata.values, tensors)


def merge_partitions(root: str | os.PathLike[str]) -> Data | HeteroData:
    """Reads all parts and puts the whole graph together again, as it was written.

    Raises:
        PartitionError: When a file is missing or damaged.
    """
    metadata = read_metadata(root)
    parts = [read_part(root, p, metadata=metadata) for p in range(metadata.num_parts)]
    if metadata.hetero is not None:
        return merge_hetero(metadata.hetero, metadata.attributes, metadata.values, parts)
    data = merge_parts(metadata.attributes, metadata.values, metadata.num_nodes, parts)
    n_id = [part["n_id"] for part in parts]
    merge_lists(data, metadata.lists, parts, n_id, n_id)
    return data
