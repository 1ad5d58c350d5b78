"""Which communicator a process gets: alone, from torchrun's environment, by backend."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from pyg_sar.comm import backends, processes
from pyg_sar.comm.environment import read_environment
from pyg_sar.comm.group import (
    Communicator,
    LocalCommunicator,
    current,
    finalize,
    init,
)
from pyg_sar.comm.messages import Posts
from pyg_sar.errors import CommTimeoutError
from pyg_sar.ledger import Ledger

FETCH = ("conv", "forward", "fetch")

# The network #################################################################


def test_the_interface_to_the_first_worker(monkeypatch):
    """That of the route's own address; none within the machine, or to names nobody knows."""
    asked = []

    class Probe(socket.socket):
        def connect(self, where):
            asked.append(where[0])

        def getsockname(self):
            return "10.1.2.3", 4

    addresses = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth7": [SimpleNamespace(address="fe80::1"), SimpleNamespace(address="10.1.2.3")],
    }
    assert processes.interface_to("127.0.0.1") is None
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    with monkeypatch.context() as patch:
        patch.setattr(processes.socket, "socket", Probe)
        assert processes.interface_to("10.1.2.9") == "eth7"
        assert asked == ["10.1.2.9"]
        addresses["eth7"].clear()
        assert processes.interface_to("10.1.2.9") is None
    assert processes.interface_to("no such host.invalid") is None


def test_gloo_is_told_the_interface_while_it_connects(monkeypatch):
    name = "GLOO_SOCKET_IFNAME"
    monkeypatch.setattr(backends, "interface_to", {"host0": "eth7", "localhost": None}.get)
    monkeypatch.delenv(name, raising=False)
    for master, expected in (("host0", "eth7"), ("localhost", None), ("", None)):
        with backends._interface(master):
            assert os.environ.get(name) == expected
        assert name not in os.environ
    monkeypatch.setenv(name, "mine")
    with backends._interface("host0"):
        assert os.environ[name] == "mine"
    assert os.environ[name] == "mine"


# One process #################################################################


def test_local():
    comm = LocalCommunicator()
    x = torch.arange(3.0)
    with Ledger(comm) as ledger:
        assert comm.all_reduce(x) is x
        assert torch.equal(comm.all_gather(x)[0], x)
        assert comm.broadcast(x) is x
        assert comm.all_gather_object((1, "a")) == [[1, "a"]]
        assert comm.broadcast_object({"a": 1}) == {"a": 1}
        comm.barrier()
        work = comm.exchange_all([None], [None], label=FETCH)
        work.wait()
        assert work.done()
        with pytest.raises(ValueError, match="must be another rank than 0 of 1 worker"):
            comm.exchange(x, 0, None, 0, label=FETCH)
    assert (ledger.sent, ledger.received) == (0, 0)


def test_current_without_init_is_one_local_communicator():
    finalize()
    comm = current()
    assert (comm.backend, comm.rank, comm.world_size) == ("local", 0, 1)
    assert current() is comm


def test_init_alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    finalize()
    comm = init(timeout=5)
    try:
        assert init() is current() is comm
        assert (comm.world_size, comm.timeout) == (1, 5)
        seen: list[Communicator] = []
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert seen == [comm]  # Also from autograd's or a loader's threads.
    finally:
        finalize()
    assert current() is not comm


# The environment #############################################################

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}


def test_environment():
    assert read_environment({}) is None
    place = read_environment(TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.agent_store) == (
        1,
        3,
        None,
        False,
    )
    more = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = read_environment(TORCHRUN | more)
    assert place is not None
    assert (place.local_rank, place.local_world_size, place.agent_store) == (0, 1, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not set.*torchrun"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": "3"}, "RANK=3 must be between 0 and 2"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be between 1 and 65535"),
        ({"LOCAL_RANK": "5"}, "LOCAL_RANK=5"),
    ],
)
def test_incomplete_environment(change, message):
    env = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        read_environment(env)


def test_workers_that_do_not_come(monkeypatch):
    finalize()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    for name, value in (TORCHRUN | {"RANK": "0", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(CommTimeoutError, match=r"Rank 0 waited 1 s for rank\(s\) \[1, 2\] of 3"):
        init("gloo", timeout=1)


def test_invalid_arguments():
    with pytest.raises(ValueError, match="backend='smoke' must be one of gloo, nccl, ccl"):
        init("smoke")
    for timeout in (0, -1, float("inf"), "long"):
        with pytest.raises(ValueError, match="timeout=.* must be a positive number"):
            init(timeout=timeout)  # type: ignore[arg-type]


# Backends ####################################################################


def test_missing_backends_say_what_they_need(monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "")
    finalize()
    with pytest.raises(ValueError, match="'ccl' needs .* ended with torch 2.8 .*'gloo'.*'xccl'"):
        init("ccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'nccl' needs a PyTorch built with NCCL"):
        init("nccl")


def test_nccl_needs_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    choose = backends.NcclTransport.choose_device
    place = read_environment(TORCHRUN | {"LOCAL_RANK": "1"})
    assert place is not None
    assert choose(place) == torch.device("cuda", 1)
    place = read_environment(TORCHRUN)
    assert place is not None
    with pytest.raises(ValueError, match="LOCAL_RANK is not set"):
        choose(place)
    place = read_environment(TORCHRUN | {"LOCAL_RANK": "2"})
    assert place is not None
    with pytest.raises(ValueError, match=r"LOCAL_RANK=2, but this host has 2 CUDA device"):
        choose(place)


def test_staged_data_lands_in_the_callers_tensor():
    """Through memory of another device, what is received is copied back."""

    class Mirror(backends.GlooTransport):
        """Sends to itself, over memory that isn't the tensors'."""

        def __init__(self) -> None:
            self.posts = Posts()

        def stage(self, tensor):
            return tensor.clone()

        def buffer(self, tensor):
            return torch.empty_like(tensor)

        def transfer(self, sends, recvs, tags):
            for (_, source), (_, target) in zip(sends, recvs, strict=True):
                target.copy_(source)

    recv = torch.zeros(2, 3)
    Mirror().exchange([(1, torch.arange(6.0).view(2, 3))], [(1, recv)])
    assert recv.tolist() == [[0, 1, 2], [3, 4, 5]]
