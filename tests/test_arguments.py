"""Wrong arguments of the public calls: one error that names the argument and what was given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import pyg_sar
from pyg_sar import SARPolicy
from pyg_sar.train.flow import NeighborSampling


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mode", "1"),
        ("mode", 0),
        ("mode", 4),
        ("prefetch", 2),
        ("prefetch", -1),
        ("prefetch", 0.5),
        ("message_budget", "1MiB"),
        ("message_budget", 0),
        ("message_budget", 0.5),
        ("strategy", "fast"),
        ("kernels", None),
        ("push", True),
        ("wire", "int3"),
        ("wire", None),
        ("transform_first", 1),
        ("random", "own"),
        ("refresh_every", 0),
        ("measure_every", True),
        ("measure_every", 0),
        ("measure_every", 2.0),
    ],
)
def test_policy_names_the_wrong_setting(setting, value):
    with pytest.raises(ValueError, match=f"Expected '{setting}' to be .*{re.escape(repr(value))}"):
        SARPolicy(**{setting: value})


def test_a_ledger_is_of_workers():
    with pytest.raises(TypeError, match=r"'comm' to be the workers, .*current\(\) \(got Data\)"):
        pyg_sar.Ledger(Data())
    with pytest.raises(ValueError, match=r"Unknown selection \['layr'\]"):
        pyg_sar.Ledger(pyg_sar.comm.current()).sent_bytes(layr="convs.0")


# Calls #######################################################################


def graph() -> Data:
    rows = torch.arange(12)
    return Data(
        x=torch.rand(12, 4),
        edge_index=torch.stack([rows, rows.roll(1)]),
        y=rows % 3,
        train_mask=rows % 2 == 0,
        node_ones=torch.ones(12).long(),
    )


def net() -> GCN:
    return GCN(4, 4, 2, 3)


def trainer(**given: Any) -> None:
    arguments: dict[str, Any] = {"model": net(), "data": graph(), **given}
    pyg_sar.Trainer(arguments.pop("model"), arguments.pop("data"), **arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("model", None),
        ("data", "parts"),
        ("config", {"epochs": 1}),
        ("forward", 3),
        ("metrics", [max]),
        ("splits", ["train_mask"]),
        ("flow", 3),
        ("sampler", 10),
        ("evaluate_on", [Data()]),
        ("optimizer", torch.optim.Adam),
        ("callbacks", pyg_sar.train.LineProgress()),
    ],
)
def test_trainer_names_the_argument_of_another_type(argument, value):
    with pytest.raises(TypeError, match=f"Expected '{argument}' to be "):
        trainer(**{argument: value})


def test_trainer_refuses_what_cannot_be_meant():
    other = torch.optim.SGD(net().parameters(), lr=1.0)
    for given, text in (
        ({"optimizer": other}, "no parameter of 'model', which would not be trained"),
        ({"splits": {"trian": "train_mask"}}, r"'splits' to name train, val, test \(got \['trian'"),
        ({"splits": {"train": "node_ones"}}, r"data.node_ones lists 1 row in 12 numbers"),
        ({"flow": graph()}, "'flow' has no 'input_id': make it by message_flow_graphs"),
        ({"labels": "0.5"}, r"'labels' to be in \[0, 1\) \(got '0.5'\)"),
    ):
        with pytest.raises(ValueError, match=text):
            trainer(**given)
    model = net()
    with pytest.raises(ValueError, match="LBFGS asks for a closure"):
        trainer(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=r"callbacks\[0\]=3 has no on_start\(\)"):
        trainer(callbacks=[3])


@pytest.mark.parametrize("numbers", [3, (), (0,), ("3",), (True,), (1.5,)])
def test_sampling_names_wrong_numbers(numbers):
    with pytest.raises(ValueError, match=re.escape(f"such as (10, 5) (got {numbers!r})")):
        NeighborSampling(num_neighbors=numbers)
    for size in (0, 1.5, "9"):
        with pytest.raises(ValueError, match=f"'batch_size' to be .*got {size!r}"):
            NeighborSampling(num_neighbors=(3,), batch_size=size)


def test_checkpoints_need_a_file_and_a_number(tmp_path):
    for every in (0, "3", True):
        with pytest.raises(ValueError, match=f"'every' to be .*got {every!r}"):
            pyg_sar.train.CheckpointEvery("c", every=every)
    with pytest.raises(ValueError, match="is a folder: give the name of a file"):
        pyg_sar.train.CheckpointEvery(tmp_path)


def test_paths_and_devices(tmp_path):
    for call in (
        lambda: pyg_sar.write_partitions(graph(), 2, None),
        lambda: pyg_sar.load_partition(3),
        lambda: pyg_sar.tools.load_model(None),
    ):
        with pytest.raises(TypeError, match=r"Expected '(root|checkpoint)' to be a path \(got"):
            call()
    with pytest.raises(TypeError, match=r"'node_ids' to be a list of .* \(got 3\)"):
        pyg_sar.write_partitions(graph(), 2, tmp_path / "p", node_ids=3)
    pyg_sar.write_partitions(graph(), 1, tmp_path / "p")
    with pytest.raises(ValueError, match="device='gpu' is no device such as 'cpu'"):
        pyg_sar.load_partition(tmp_path / "p", device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='cuda' at rank 0, but this host has 0"):
            pyg_sar.load_partition(tmp_path / "p", device="cuda")
    missing = tmp_path / "none"
    for start in (
        lambda: pyg_sar.launch(print, 1, parts=1, store=missing),
        lambda: pyg_sar.verify(net(), graph(), 2, store=missing),
        lambda: pyg_sar.infer(net(), graph(), parts=2, store=missing),
    ):
        with pytest.raises(ValueError, match="store='.*none' is no folder: make it"):
            start()


def test_distribute_infer_plan_and_pairs(tmp_path):
    for call, text in (
        (
            lambda: pyg_sar.distribute(GCN),
            "'model' to be a torch.nn.Module .got type",
        ),
        (
            lambda: pyg_sar.distribute(net(), 3),
            "policy to be a pyg_sar.SARPolicy .got 3",
        ),
        (
            lambda: pyg_sar.distribute(net(), layer_policies={"convs.0": 3}),
            r"layer_policies\['convs.0'\] to be a pyg_sar.SARPolicy",
        ),
        (
            lambda: pyg_sar.distribute(net(), layer_policies=["a"]),
            "'layer_policies' to be a dict",
        ),
        (lambda: pyg_sar.infer(None, graph()), "'model' to be a torch.nn.Module .got NoneType"),
        (lambda: pyg_sar.infer(net(), graph(), forward=3), "forward=3 must be a function"),
        (lambda: pyg_sar.infer(net(), graph(), policy=3), "'policy' to be a SARPolicy or None"),
        (lambda: pyg_sar.plan(None, "p"), "model=None must be a module, or a function"),
        (lambda: pyg_sar.plan(net(), "p", call=3), "call=3 must be a module, or a function"),
        (lambda: pyg_sar.plan(net(), "p", modes=1), "'modes' to be a sequence"),
        (lambda: pyg_sar.plan(net(), None), "'data' to be a graph, a partition's folder"),
        (lambda: pyg_sar.nn.negative_sampling(None), r"tensor of shape \[2, E\] .got None"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    with pytest.raises(ValueError, match="node_type='a' is for a HeteroData"):
        pyg_sar.infer(net(), graph(), node_type="a")
    with pytest.raises(IsADirectoryError, match="give the name of a .npy file"):
        pyg_sar.infer(net(), graph(), out=tmp_path)
    never = lambda *given: pytest.fail("computed")  # noqa: E731
    with pytest.raises(ValueError, match="'out' to be the name of a .npy file .got '.*x.txt'"):
        pyg_sar.infer(net(), graph(), out=tmp_path / "x.txt", forward=never)
    with pytest.raises(FileNotFoundError, match="No such folder: '.*nowhere'"):
        pyg_sar.infer(net(), graph(), out=tmp_path / "nowhere" / "x.npy", forward=never)
    with pytest.raises(ValueError, match="bandwidth='1Gb' must be a positive number"):
        pyg_sar.plan(net(), "p", bandwidth="1Gb")
