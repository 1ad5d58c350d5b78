"""Launches of the tests with hosted parts: each worker of a test is a part (``pytest --hosted``).

Worker processes become parts that two worker processes host. So whatever the tests show of
workers is shown of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pyg_sar
from pyg_sar.comm import launch as starting
from pyg_sar.comm.communicator import LocalCommunicator
from pyg_sar.comm.host import Hosting
from pyg_sar.comm.hosting import PartError, host_parts

PROCESSES = 2

# Files of which no test starts workers by pyg_sar.launch alone, or that are about starting.
OTHER_FILES = {
    "test_script": "the command hosts parts itself",
    "test_comm": "is about the backends",
    "test_examples": "runs scripts",
    "test_failures": "is about the backends",
    "test_gpu_workers": "starts workers within workers",
    "test_forked_workers": "is about the tests' processes",
    "test_hosting": "is about hosted parts already",
    "test_init": "is about the start",
    "test_launch": "is about the start",
    "test_local_peers": "is about shared memory",
    "test_replicate": "says itself how many parts a replica's workers host",
    "test_shared_memory": "is about shared memory",
    "test_stale": "hosted parts refuse SARPolicy(refresh_every=...)",
}
HALO = "all of a part's halo is resident at once, not one shard"
COVER = "hosted parts take no cover: no states are pushed, and rows come, or all slots"
NOT_OF_PARTS = {
    "test_a_cover_that_saves_little_is_not_taken": COVER,
    "test_a_hook_on_one_worker_ends_in_an_error": "names the operations of the backends",
    "test_a_kernel_of_ones_own": COVER,
    "test_a_layer_whose_policy_changes_runs_by_the_new_one": "counts what a process runs",
    "test_a_module_trains_as_in_one_process": "divides the workers into replicas",
    "test_a_narrow_wire_needs_no_more_rows": HALO,
    "test_a_row_source_over_a_file": "its source has a unit for each owner",
    "test_a_steady_call_runs_little_python": "counts the functions of the backends",
    "test_a_worker_that_computes_keeps_the_others_waiting": "a part waits for its turn",
    "test_a_worker_killed_mid_epoch_and_the_curve_after_it": "compares with workers, to the bit",
    "test_a_signal_to_one_worker_saves_and_ends_all": "signals come to the thread of a process",
    "test_as_many_rows_as_the_matching_says": COVER,
    "test_bytes_and_resident_rows": HALO,
    "test_bytes_by_the_law": COVER,
    "test_covers_come_with_the_partition": COVER,
    "test_distributed_data_parallel": "each worker is a rank of torch.distributed",
    "test_bytes_and_memory_of_every_worker": "names the memory of each worker",
    "test_exact_in_a_fourth_of_the_memory": "hosts parts itself",
    "test_exchanges_are_pairwise": "parts exchange no messages in pairs",
    "test_joined_relations_stream_like_one": HALO,
    "test_layer_policies_take_effect": HALO,
    "test_messages_are_made_when_it_is_their_turn": COVER,
    "test_override_survives": HALO,
    "test_owners_read_gradients_of_targets": COVER,
    "test_parts_hosted_together_round_the_same_rows": "hosts parts itself",
    "test_pairs_without_rows_send_nothing": "parts exchange no messages in pairs",
    "test_resident_rows_in_mode_1": HALO,
    "test_resident_rows_of_chunks": HALO,
    "test_rule_2_nothing_of_a_shard_outlives_its_turn": HALO,
    "test_targets_of_another_type": COVER,
    "test_on_workers": "counts what a process runs",
    "test_the_product_of_own_rows_is_added_in_place": "parts without a store add it afterwards",
    "test_the_rows_of_one_owner_or_chunk_are_resident": HALO,
    "test_under_torchrun_rank_0_speaks_and_the_curve_is_the_same": "the command starts workers",
    "test_what_is_made_on_the_way_is_where_the_data_is": "hosted parts compute on the CPU",
    "test_who_pushes": COVER,
    "test_wrong_world_size": "its errors name workers",
}


def why_not(item: pytest.Item) -> str | None:
    """Returns why a test says nothing of hosted parts."""
    return not_of_parts(item.path.name, getattr(item, "originalname", item.name))


def not_of_parts(file: str, name: str) -> str | None:
    """The same of the test ``name`` of a file."""
    return NOT_OF_PARTS.get(name) or OTHER_FILES.get(file.removesuffix(".py"))


def host(fn: Callable[..., Any], parts: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs ``fn(*args)`` for parts that this process hosts; fails as :func:`launch` does.

    Unlike :func:`pyg_sar.run`, it leaves the process without a communicator.
    """
    outer = LocalCommunicator(torch.device("cpu"), timeout)
    try:
        return host_parts(fn, args, Hosting(parts), outer)
    except PartError as failure:
        raise starting._describe(failure.error, failure.part)[0] from failure.error


@contextmanager
def hosted_workers() -> Iterator[None]:
    """Meanwhile ``pyg_sar.launch`` makes each worker a hosted part."""
    original = starting.launch

    def launch(fn: Any, num_workers: int, *args: Any, **how: Any) -> list[Any]:
        backend = how.get("backend")
        if backend not in (None, "gloo") or "parts" in how:
            return original(fn, num_workers, *args, **how)
        return original(fn, min(PROCESSES, num_workers), *args, parts=num_workers, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyg_sar, "launch", launch)
        yield
