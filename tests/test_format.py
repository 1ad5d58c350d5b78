"""The declaration of the partition format: what follows from it, and that the documents have it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hetero_graphs import make_hetero
from oracle import make_graph, parts
from test_forged_parts import GRAPHS, load_file, write_part
from torch import Tensor

import pyg_sar
from pyg_sar.errors import PartitionError
from pyg_sar.partition import schema
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.partition.schema import KINDS, SIZES, TENSORS, PartTensor
from pyg_sar.partition.storage import merge_partitions, part_file, read_part

PARTS = 3
REPOSITORY = Path(__file__).resolve().parent.parent

# The table's digest in each version: where it changes, partitions of before don't fit it.
VERSIONS = {6: "8d385a8c252cacea"}


def format_table() -> str:
    """Returns the format's table in Markdown, as docs/partitioning.md has it."""
    titles = ("tensor", "of", "dtype", "shape", "values", "content")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for tensor in TENSORS:
        kinds = ", ".join(KINDS[kind] for kind in tensor.kinds)
        shape = ", ".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        rules = ["below " + "; ".join(tensor.below)] if tensor.below else []
        rules += ["ascending"] * tensor.ascends + ["each in one part"] * tensor.once
        if tensor.counted_by:
            rules.append(f"ascending in the runs of `{tensor.counted_by}`")
        values = ", ".join(rules)
        cells = [f"`{tensor.name}`", kinds, dtype, f"[{shape}]", values, tensor.content]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def digest() -> str:
    fields = ("name", "kinds", "dtype", "shape", "below", "ascends", "counted_by", "once")
    rows = [[str(getattr(tensor, field)) for field in fields] for tensor in TENSORS]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def test_another_table_is_another_version():
    assert VERSIONS == {schema.VERSION: digest()}, "raise VERSION, and put the table's digest here"


def test_the_documents_have_the_table():
    text = (REPOSITORY / "docs" / "partitioning.md").read_text()
    assert format_table() in text, f"docs/partitioning.md should hold\n\n{format_table()}"
    assert all(f"| `{letter}` | {words} |" in text for letter, words in SIZES.items())


def test_the_table_names_what_there_is():
    for tensor in TENSORS:
        letters = [size for size in tensor.shape if isinstance(size, str)]
        letters += [size for bound in tensor.below for size in bound.split(" + ")]
        assert set(letters) <= SIZES.keys() and set(tensor.kinds) <= KINDS.keys(), tensor.name
        for kind in tensor.kinds:
            assert tensor.counted_by in ("", *(row.name for row in schema.tensors_of(kind)))
    for kind in KINDS:
        assert [row.once for row in schema.tensors_of(kind)].count(True) == 1


@pytest.mark.parametrize("graph", ["plain", "hetero"])
def test_files_hold_what_the_table_says(graph: str, tmp_path: Path):
    """Shapes and dtypes by the sizes; each size of a part is one number."""
    pyg_sar.write_partitions(GRAPHS[graph](), PARTS, tmp_path / "parts", "random")
    metadata = read_metadata(tmp_path / "parts")
    for p in range(PARTS):
        tensors = read_part(tmp_path / "parts", p)
        for group in metadata.groups():
            sizes: dict[str, int] = {"P": PARTS}
            for tensor in schema.tensors_of(group.kind):
                value = tensors[group.prefix + tensor.name]
                assert value.dtype == tensor.dtype and value.dim() == len(tensor.shape)
                for size, count in zip(tensor.shape, value.shape, strict=True):
                    letter = size if isinstance(size, str) else f"{size}"
                    assert count == (sizes.setdefault(letter, count) if letter == size else size)


# Another tensor ##############################################################


def wrong_degrees(rows: schema.PartRows) -> str:
    degree = rows.tensors["edge_index"][1].bincount(minlength=rows.sizes["m"])
    return "" if torch.equal(degree, rows.tensors["degree"]) else "it does not count the edges"


DEGREE = PartTensor(
    name="degree",
    kinds=("edge", "links"),
    shape=("m",),
    content="in-edges of its nodes",
    make=lambda edges: edges.edge_index[1].bincount(
        minlength=edges.layout.targets.ids(edges.part).numel()
    ),
    problem=wrong_degrees,
)


@pytest.mark.parametrize("graph", ["plain", "hetero"])
def test_a_row_of_the_table_adds_a_tensor(
    graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is written and checked; refused where it is missing, or its shape or values are others.

    The code that reads it (``global_view.py``) and the documents are the other files to change.
    """
    data = GRAPHS[graph]()
    pyg_sar.write_partitions(data, PARTS, tmp_path / "before", "random")
    monkeypatch.setattr(schema, "TENSORS", (*TENSORS, DEGREE))
    root = tmp_path / "parts"
    pyg_sar.write_partitions(data, PARTS, root, "random")
    groups = [g for g in read_metadata(root).groups() if g.kind in DEGREE.kinds]
    total = 0
    for p in range(PARTS):
        tensors = read_part(root, p)
        for group in groups:
            total += int(tensors[f"{group.prefix}degree"].sum())
    assert total == sum(group.total for group in groups)
    whole = merge_partitions(root)
    assert whole.num_nodes == data.num_nodes and whole.num_edges == data.num_edges
    assert parts(lambda: pyg_sar.load_partition(root).num_nodes, PARTS) == [data.num_nodes] * PARTS
    with pytest.raises(PartitionError, match="lacks the tensor '.*degree'"):
        read_part(tmp_path / "before", 0)
    name = f"{groups[0].prefix}degree"
    changes = {
        "it is torch.int32": lambda t: t.int(),
        "it is torch.int64 of shape": lambda t: t[1:].clone(),
        "it does not count the edges": lambda t: t + 1,
    }
    original = load_file(root / part_file(1, PARTS))
    for text, change in changes.items():
        altered: dict[str, Tensor] = {**original, name: change(original[name])}
        write_part(root, 1, altered)
        with pytest.raises(PartitionError, match=f"'{name}' of .*part-00001.*{text}"):
            read_part(root, 1)


def test_relations_have_the_same_tensors_as_a_graph(tmp_path: Path):
    pyg_sar.write_partitions(make_graph(), 1, tmp_path / "plain")
    hetero = make_hetero()
    pyg_sar.write_partitions(hetero, 1, tmp_path / "hetero")
    plain, several = (read_part(tmp_path / name, 0).keys() for name in ("plain", "hetero"))
    edges = {row.name for row in schema.tensors_of("edge")}
    assert edges < set(plain)
    for k in range(len(hetero.edge_types)):
        assert {f"relation.{k}/{name}" for name in edges} < set(several)
