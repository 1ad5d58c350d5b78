"""Partitions on the disk: a folder of versioned JSON and one safetensors file per part.

.. code-block:: text

    root/metadata.json                       format, version, sizes, statistics, attributes, parts
    root/part-00000-of-00004.safetensors     memory mapped by the worker that owns it

``schema.py`` declares the tensors of a part. Partitions of other versions are refused.

[Note: a write is all or nothing] Everything goes to a temporary folder beside ``root``, the
metadata last; files and folders are flushed to the disk; then the folder is renamed. A folder
without its metadata does not load, so no interrupted write does.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar.comm.agreement import raised_everywhere
from pyg_sar.comm.group import Communicator, current
from pyg_sar.errors import PartitionError
from pyg_sar.files import (
    TemporaryFolder,
    check_path,
    check_type,
    explained,
    parse_bytes,
    read_aligned,
    read_text,
    save_aligned,
    sha256_of,
    with_checksum,
)
from pyg_sar.files import flush as _flush
from pyg_sar.partition.assignment import Assignment, check_num_parts
from pyg_sar.partition.attributes import RESERVED, encode, tensor_names
from pyg_sar.partition.layout import PartitionStatistics
from pyg_sar.partition.metadata import METADATA, PartitionMetadata, read_metadata
from pyg_sar.partition.node_lists import NodeIds
from pyg_sar.partition.part_checks import check_marks, check_part, part_marks
from pyg_sar.partition.parts import as_batch, merge_parts
from pyg_sar.partition.schema import VERSION, PartTensors
from pyg_sar.partition.scratch import Scratch
from pyg_sar.partition.series import SERIES_FILES, check_series, merge_series, write_series
from pyg_sar.partition.unfinished import Unfinished, digest, unfinished_folder
from pyg_sar.partition.whole_graph import prepare
from pyg_sar.tensors import NodeTensor
from pyg_sar.wording import counted

Progress = Callable[[str], None]

_FEW_PARTS = 64  # may be more than there are nodes


# Writing #################################################################################


def write_partitions(
    data: Data | HeteroData,
    num_parts: int,
    root: str | os.PathLike[str],
    method: str | Tensor | np.ndarray[Any, Any] | Assignment = "balanced",
    seed: int = 0,
    *,
    node_ids: NodeIds | None = None,
    levels: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    memory: int | str | None = None,
    balance_training: bool = False,
    series: Mapping[str, Any] | None = None,
) -> PartitionStatistics:
    """Partitions a graph and writes it to a folder, one file per part.

    .. code-block:: python

        print(pyg_sar.write_partitions(data, 4, "parts"))  # edges cut, nodes and edges of each part

    Every node belongs to one part, every edge to the part of its target. Any ``Data`` or
    ``HeteroData`` will do: directed or not, with self loops, duplicate edges, isolated nodes,
    types without features or edges, relations without edges, and any node-, edge- or graph-level
    attributes, sparse ones included. The same arguments give the same files.

    Attributes that hold node ids are split to the nodes' owners: lists of them ``[K]``, such as
    ``train_idx`` or OGB's ``split_idx``, and pairs ``[2, K]``, such as ``edge_label_index``, with
    the attributes that have a row per entry (``edge_label``). By PyG's convention these are
    attributes whose name has 'index' in it, or the word 'idx'. Loaded, they are tensors of the
    whole graph.

    A batch of graphs (PyG's ``Batch``) is one graph, and loaded a ``Batch`` again, whose length is
    the number of graphs.

    Args:
        data: The graph.
        num_parts: The number of parts; one per worker.
        root: The folder to write. It must not exist, or be empty, unless ``overwrite``.
        method: ``'balanced'``, ``'metis'``, ``'coarsened'``, ``'geometric'`` (by ``data.pos``),
            ``'random'``, ``'contiguous'``, or an integer vector ``[num_nodes]`` (see
            :func:`~pyg_sar.partition.assignment.assign_nodes`); of a ``HeteroData`` a dict
            of such vectors by node type (:func:`~pyg_sar.partition.assignment.assign_node_types`).
        seed: Seed of the partitioner.
        node_ids: Names of more attributes that hold node ids; or for each name whether it does,
            ``{'roots': True, 'cluster_idx': False}``. Of a dict of lists its name. ``False``
            keeps an attribute's values as they are.
        levels: For attributes of a ``Data`` whether their rows are nodes or edges, or neither:
            ``{'weight': 'edge', 'degree': 'node', 'prior': 'graph'}``. Needed where a graph has as
            many edges as nodes, and a name doesn't tell.
        overwrite: Replace an existing partition at ``root``.
        progress: Called with a line of text before each stage.
        memory: Bytes, or ``'2GiB'``, that this may take beside the graph. Attributes with a row
            per edge or node are then read in pieces and grouped in files beside ``root``, which
            take at most twice the graph's size. A graph that is memory mapped (``load_graph`` of a
            folder) may be larger than the memory. ``'balanced'`` becomes ``'coarsened'`` where
            METIS takes more (:mod:`pyg_sar.partition.scratch`). Sparse matrices and texts stay in
            memory.
        balance_training: Training nodes (``train_mask``; of several splits the first) are within
            1.1 times their mean as well, by ``'balanced'`` and ``'coarsened'``: for training on
            what they need only (message flow graphs). More edges are cut.
        series: Snapshots of all nodes, ``{'x': array[T, N, F]}``: NumPy's arrays, memory maps, or
            what else has ``shape``, ``dtype`` and slices (zarr). They are read a few snapshots at
            a time; :func:`pyg_sar.partition.load_series` gives a worker its rows of them.

    Returns:
        Edge cut, balance, halo rows and replication factor; ``print`` shows a table, of a
        ``HeteroData`` for each node type and relation too.

    Raises:
        ValueError: When an argument or an attribute of ``data`` can't be used; when an attribute
            may hold node ids (integers with no row per node or edge), or its rows may be nodes or
            edges, of which there are as many, and ``node_ids`` or ``levels`` doesn't say so; when a
            part does not fit into ``memory``: names a number of parts that does.
        TypeError: When ``data`` is neither a ``Data`` nor a ``HeteroData``, or ``method`` does
            not fit it.
        FileExistsError: When ``root`` exists.
        OSError: When ``root`` can't be written; it is then as it was before.
        KeyboardInterrupt: On Ctrl-C; with ``memory`` it says where what is done is kept.
    """
    report = progress or (lambda text: None)
    check_type("data", data, (Data, HeteroData), "a Data or a HeteroData, one graph")
    check_num_parts(num_parts)
    check_path("root", root)
    root = Path(root)
    root = root.resolve() if root.is_symlink() or not root.name else root
    _check_target(root, overwrite)
    limit = None if memory is None else parse_bytes(memory, "memory")
    check_type("balance_training", balance_training, bool, "True or False")
    how: dict[str, Any] = {
        "node_ids": node_ids,
        "levels": levels,
        "balance_training": balance_training,
    }
    check_series({} if series is None else series, data)
    if limit is None:
        prepared = prepare(data, num_parts, method, seed, report, **how)
    unfinished: Unfinished | None = None
    folder: TemporaryFolder | None = None
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        if limit is not None:
            how["levels"] = dict(levels or {})
            unfinished = _resumed(root, data, (num_parts, method, seed, how, limit), report)
        if unfinished is None:
            folder = TemporaryFolder.beside(root)
            place = folder.path
        else:
            place = unfinished.folder
        if limit is not None:
            (place / "scratch").mkdir()
            scratch = Scratch(place / "scratch", limit, report, unfinished)
            prepared = prepare(data, num_parts, method, seed, report, scratch=scratch, **how)
        header, statistics, tensors_of = prepared
        nodes = statistics.num_nodes
        most = max(nodes, _FEW_PARTS)
        if isinstance(method, str) and num_parts > most:
            raise ValueError(
                f"Expected 'num_parts' to be at most {most:,} for {nodes:,} nodes (got {num_parts})"
            )
        target = place / "parts"
        target.mkdir(exist_ok=True)
        parts = []
        for p in range(num_parts):

            def write(folder: Path, p: int = p) -> dict[str, Any]:
                report(f"writing part {p + 1} of {num_parts}")
                return _write_part(folder, tensors_of(p), p, num_parts)

            name = part_file(p, num_parts)
            parts.append(write(target) if unfinished is None else unfinished.part(name, write))
        if series:
            ids = [read_aligned(target / part["file"])["n_id"] for part in parts]
            header["series"] = write_series(target, series, ids, report)
        _write_metadata(target, {**header, "parts": parts})
        folder = folder or TemporaryFolder.beside(root)
        _publish(folder, target, root, overwrite)
    except FileExistsError as error:
        if unfinished is None:
            raise
        unfinished.keep = True
        more = "what is done is kept: the same call takes it once the folder is empty"
        raise FileExistsError(f"{error}; {more}") from None
    except KeyboardInterrupt:
        if unfinished is not None:
            unfinished.keep = True
            raise KeyboardInterrupt(
                f"what is done is kept in '{unfinished.folder}'; the same call goes on from there"
            ) from None
        raise
    except (OSError, SafetensorError) as error:
        raise explained(error, root) from error
    finally:
        if folder is not None:
            folder.close()
        if unfinished is not None:
            unfinished.close()
    return statistics


def _resumed(
    root: Path, data: Any, arguments: tuple[Any, ...], report: Callable[[str], None]
) -> Unfinished | None:
    """Returns the folder of what is done; ``None`` where it can't be known to be of this graph."""
    try:
        request = json.dumps(arguments)
    except TypeError:  # An assignment of the user's.
        return None
    if unfinished_folder(root).exists():
        report("reading the graph, to know if it is the one of the unfinished run")
    else:
        report("reading the graph, by whose digest a run that is killed can be taken up")
    known = digest(data)
    if known is None:
        return None
    return Unfinished(root, {"version": VERSION, "arguments": request, "graph": known}, report)


def part_file(part: int, num_parts: int) -> str:
    """Returns the file name of a part."""
    return f"part-{part:05d}-of-{num_parts:05d}.safetensors"


def _write_part(folder: Path, tensors: PartTensors, p: int, num_parts: int) -> dict[str, Any]:
    path = folder / part_file(p, num_parts)
    save_aligned(tensors, path)
    _flush(path)
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "bytes": path.stat().st_size,
        "num_nodes": _count(tensors, "n_id"),
        "num_edges": _count(tensors, "e_id"),
        "num_halo": _count(tensors, "halo_n_id"),
    }


def _count(tensors: PartTensors, name: str) -> int:
    """Counts the rows of the tensors of that name, of all node types or relations."""
    return sum(t.numel() for key, t in tensors.items() if key.rpartition("/")[2] == name)


def _write_metadata(folder: Path, content: dict[str, Any]) -> None:
    path = folder / METADATA
    path.write_text(with_checksum(content))
    _flush(path)
    _flush(folder)


def _check_target(root: Path, overwrite: bool) -> None:
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        _check_writable(root)
        return
    if not overwrite:
        raise FileExistsError(
            f"'{root}' exists; choose another folder or pass overwrite=True (--overwrite)"
        )
    if not (root / METADATA).is_file():
        raise FileExistsError(
            f"'{root}' is not a partition, so it is not overwritten; choose another folder"
        )
    others = _others(root)
    if others:
        raise FileExistsError(
            f"'{root}' holds {others[0]!r} too, which overwriting the partition would delete; move "
            "it elsewhere"
        )


_OURS = re.compile(
    rf"{METADATA}|part-\d+-of-\d+\.safetensors|{SERIES_FILES}|\.DS_Store|\.nfs[0-9a-f]+"
)


def _others(root: Path) -> list[str]:
    """Returns the names in a partition's folder of what is no file of a partition."""
    return sorted(
        entry.name
        for entry in os.scandir(root)
        if entry.is_dir(follow_symlinks=False) or not _OURS.fullmatch(entry.name)
    )


def _check_writable(root: Path) -> None:
    """Raises before the work begins where a folder can't be made."""
    parent = next(folder for folder in root.absolute().parents if folder.exists())
    number = errno.ENOTDIR if not parent.is_dir() else errno.EACCES
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise explained(OSError(number, os.strerror(number)), root)


def _publish(folder: TemporaryFolder, finished: Path, root: Path, overwrite: bool) -> None:
    """Renames a finished folder to its place; what it replaces is removed with ``folder``.

    A ``FileExistsError`` says that something has come there since the work began.
    """
    if os.path.lexists(root):
        _check_target(root, overwrite)
    if overwrite and root.is_dir() and any(root.iterdir()):
        old = folder.replace_folder(finished, root)
        if others := _others(old):  # It came in just now.
            saved = root.with_name(f"{root.name}-old")
            saved = saved if not saved.exists() else root.with_name(f"{old.parent.name}-old")
            old.rename(saved)
            raise FileExistsError(
                f"'{root}' got {others[0]!r} while it was replaced: what it held is in '{saved}'"
            )
    else:
        try:
            finished.rename(root)  # Of folders only onto an empty one.
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                _check_target(root, overwrite=False)
            raise
    _flush(root.parent)


def remove_partition(root: Path) -> None:
    """Removes a partition, a damaged one too, but no link, and no folder that holds more."""
    others = [root.name] if root.is_symlink() or not root.is_dir() else _others(root)
    if others:
        raise FileExistsError(f"'{root}': {others[0]!r} is of no partition; move it elsewhere")
    with TemporaryFolder.beside(root) as folder:
        root.rename(folder / "parts")


# Adding to it ############################################################################


def add_attributes(
    root: str | os.PathLike[str],
    attributes: Mapping[str, Tensor],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> None:
    """Writes a partition again with more node-level attributes. Collective.

    Every worker writes its own rows, in its own part; the folder gets its name when all have.

    Args:
        root: The partition that the workers have loaded.
        attributes: New attributes by name, the same names on all workers: tensors of the whole
            graph with a row per node.
        out: The folder to write, which all workers share. It may be ``root`` with ``overwrite``.
        overwrite: Replace a partition at ``out``.

    Raises:
        ValueError: On every worker, where an attribute is there already, or has other rows.
        PartitionError: On every worker, where a part can't be read or written.
    """
    comm, out = current(), Path(out)
    folder: TemporaryFolder | None = None
    described: dict[str, Any] = {}
    with ExitStack() as stack:
        with _on_all(comm, out):
            if comm.rank == 0:
                _check_target(out, overwrite)
                out.parent.mkdir(parents=True, exist_ok=True)
                folder = TemporaryFolder.beside(out)
                stack.callback(folder.close)
                (folder.path / "parts").mkdir()
        target = Path(comm.broadcast_object(f"{folder.path}/parts" if folder else ""))
        with _on_all(comm, out):
            metadata = read_metadata(root)
            metadata.check_world_size(comm.world_size, comm.host is not None)
            tensors = dict(read_part(root, comm.rank, metadata=metadata))
            for name, value in attributes.items():
                _check(name, value, metadata)
                column = encode(name, _own_rows(value, tensors["n_id"]), "node")
                whole = asdict(column.attribute)
                described[name] = whole | {"shape": [metadata.num_nodes, *whole["shape"][1:]]}
                for suffix, full in tensor_names(name, column.attribute).items():
                    tensors[full] = column.tensors[suffix].contiguous()
            if not target.is_dir():
                raise PartitionError(f"'{out}' is no folder that all workers share")
            found = _write_part(target, tensors, comm.rank, metadata.num_parts)
        gathered = comm.all_gather_object((found, described))
        with _on_all(comm, out):
            if any(shapes != described for _, shapes in gathered):
                names = sorted(described)
                raise PartitionError(
                    f"the workers' attributes differ in name, dtype or shape: {names}"
                )
            if folder is not None:
                content = json.loads(read_text(Path(root) / METADATA))
                content.pop("checksum")
                content["attributes"] |= described
                for row in content.get("series", {}).values():
                    for file in row["files"]:
                        shutil.copyfile(Path(root) / file["file"], target / file["file"])
                _write_metadata(target, content | {"parts": [part for part, _ in gathered]})
                _publish(folder, target, out, overwrite)


@contextmanager
def _on_all(comm: Communicator, out: Path) -> Iterator[None]:
    """Raises what any worker meets as a ``PartitionError`` of all of them."""
    caught = OSError, SafetensorError, PartitionError, ValueError
    with raised_everywhere(comm, PartitionError, "", *caught):
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise explained(error, out) from error


def _own_rows(value: Tensor, n_id: Tensor) -> Tensor:
    """Returns a part's rows, in its order, of a tensor of the whole graph."""
    if not isinstance(value, NodeTensor):
        return value[n_id]
    if value.axis or not torch.equal(value.rows.ids.cpu(), n_id):
        raise ValueError(f"rows of shape {list(value.shape)} are not in the order of the graph's x")
    return value.local.cpu()


def _check(name: str, value: Any, metadata: PartitionMetadata) -> None:
    if metadata.hetero:
        raise ValueError("attributes are added to partitions with one type of nodes only")
    if name in RESERVED or name in metadata.attributes:
        raise ValueError(f"'{name}' is an attribute of the partition '{metadata.root}' already")
    nodes = metadata.num_nodes
    if not isinstance(value, Tensor) or value.dim() == 0 or value.size(0) != nodes:
        raise ValueError(
            f"Expected '{name}' to have a row for each of the graph's {counted(nodes, 'nodes')} "
            f"(got {list(value.shape) if isinstance(value, Tensor) else type(value).__name__})"
        )


# Reading #################################################################################


def read_part(
    root: str | os.PathLike[str],
    part: int,
    *,
    verify: bool = True,
    metadata: PartitionMetadata | None = None,
) -> PartTensors:
    """Reads the tensors of one part, memory mapped, and checks them; no other part's file is
    touched.

    ``verify`` compares the checksum, which reads the file once; ``metadata`` is what
    :func:`read_metadata` gave, to spare a second look.
    """
    metadata = metadata or read_metadata(root)
    info = metadata.parts[part]
    path = Path(root) / part_file(part, metadata.num_parts)
    remedy = "copy it again or partition the graph anew"
    if not path.is_file():
        raise PartitionError(f"'{path}', part {part} of '{root}', is missing; {remedy}")
    try:
        size = path.stat().st_size
        if size != info.bytes:
            raise PartitionError(
                f"'{path}' has {counted(size, 'bytes')} instead of {info.bytes:,}; {remedy}"
            )
        if verify and sha256_of(path) != info.sha256:
            raise PartitionError(f"'{path}' was altered: its SHA-256 checksum differs; {remedy}")
        tensors = read_aligned(path)
    except (SafetensorError, OSError, KeyError, AttributeError) as error:
        raise PartitionError(f"'{path}' can't be read: {error}; {remedy}") from error
    check_part(metadata, part, tensors, path)
    return tensors


def merge_partitions(
    root: str | os.PathLike[str], series: dict[str, Any] | None = None
) -> Data | HeteroData:
    """Reads all parts and puts the whole graph together again, as it was written.

    Args:
        root: The partition folder.
        series: Takes the snapshots that ``write_partitions(series=...)`` wrote, by name: arrays
            ``[T, N, *]`` that are filled (memory maps, or zarr's); those that it lacks are made.

    Raises:
        PartitionError: When a file is missing or damaged.
        ValueError: There are snapshots, and ``series`` isn't given.
    """
    metadata = read_metadata(root)
    if metadata.series and series is None:
        raise ValueError(
            f"'{root}' holds series {sorted(metadata.series)}: pass series={{}} to get them as "
            "NumPy's arrays, or series={name: array} to fill arrays [T, N, ...] of your own"
        )
    parts = [read_part(root, p, metadata=metadata) for p in range(metadata.num_parts)]
    check_marks(metadata, torch.stack([part_marks(metadata, part) for part in parts]))
    if series is not None:
        merge_series(root, metadata, [part["n_id"] for part in parts], series)
    return as_batch(merge_parts(metadata.stores, parts), metadata.batched)
