"""Wrong arguments of the public calls: one error that names the argument and what was given."""

from __future__ import annotations

import re

import pytest
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import SARPolicy


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mode", "1"),
        ("prefetch", 2),
        ("message_budget", "1MiB"),
        ("message_budget", 0.5),
        ("strategy", "fast"),
        ("kernels", None),
        ("push", True),
        ("wire", "int3"),
        ("transform_first", "no"),
        ("random", "own"),
        ("refresh_every", 0),
        ("measure_every", True),
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
