"""Tensors of a partition lie where instructions on any of their numbers may read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import workers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.files import ALIGNMENT, read_aligned
from pyg_sar.partition import storage
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.partition.storage import merge_partitions, part_file, read_part, write_partitions

NODES, PARTS = 23, 3
DTYPES = (
    *(torch.complex128, torch.complex64, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.bool, torch.int16),
)


def graph() -> Data:
    draw = torch.Generator().manual_seed(1)
    edge_index = torch.randint(0, NODES, (2, 101), generator=draw)
    data = Data(edge_index=edge_index, num_nodes=NODES)
    for k, dtype in enumerate(DTYPES):
        parts = torch.randint(0, 9, (NODES, 3, 2), generator=draw)
        value = torch.view_as_complex(parts.double()) if dtype.is_complex else parts
        data[f"value_{k}"] = value.to(dtype)
        data[f"edge_{k}"] = data[f"value_{k}"][edge_index[0], 0]
    data.alpha = torch.tensor([1j, 2.0], dtype=torch.complex128)
    return data


def write_by_library(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a part as older versions did, and later than the library would."""
    save_file(tensors, path, {"a": "b"})


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("memory", [None, "200MiB"])
def test_every_tensor_is_aligned_and_the_same(
    older: bool, memory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = graph()
    if older:
        monkeypatch.setattr(storage, "save_aligned", write_by_library)
    write_partitions(data, PARTS, tmp_path / "p", "random", memory=memory)
    for p in range(PARTS):
        for name, tensor in read_part(tmp_path / "p", p).items():
            assert tensor.data_ptr() % ALIGNMENT == 0, name
    whole = merge_partitions(tmp_path / "p")
    assert all(torch.equal(whole[name], value) for name, value in data.to_dict().items()
               if isinstance(value, Tensor))  # fmt: skip

    def worker() -> Tensor:
        part = pyg_sar.load_partition(tmp_path / "p")
        assert torch.equal(part.value_0.full_tensor(), data.value_0)
        return (part.value_0 * part.value_0.conj()).full_tensor()

    for square in workers(worker, PARTS):
        torch.testing.assert_close(square, data.value_0 * data.value_0.conj())


def test_aligned_tensors_are_mapped_not_copied(tmp_path: Path):
    write_partitions(graph(), PARTS, tmp_path / "p", "random")
    path = tmp_path / "p" / part_file(0, PARTS)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % ALIGNMENT == 0
    found = read_aligned(path)
    assert {name.partition(".")[0] for name in load_file(path)} - {"filler"} == {
        name.partition(".")[0] for name in found
    }
    size = read_metadata(tmp_path / "p").parts[0].bytes
    assert sum(t.nbytes for t in found.values()) <= size < path.stat().st_size + 1
    # All lie in one mapping of the file, at most its size apart.
    places = [t.data_ptr() for t in found.values() if t.numel()]
    assert max(places) - min(places) < size
