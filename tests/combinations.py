"""Which combinations `make test` takes, where all of them would take too long for it.

``--all`` (`make test-full`) takes all. Without it

* a sweep (:class:`oracle.Sweep`) tries all policies: each layer runs by its share of them, others
  for other layers and other numbers of workers; every second layer runs as parts of the process;
* a test of :data:`PAIRS` runs with a choice of its parameters in which each value of one meets each
  value of every other (a covering array of strength 2, found greedily);
* a test of :data:`EVERY` runs with each n-th set of its parameters, the last one included;
* the workers of every second test are parts of one process, but of files of :data:`OF_PROCESSES`;
* a test of :data:`LONG`, which starts many processes or much data, and whose parts other tests
  have, does not run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")

SWITCH = "PYG_SAR_TESTS_ALL"  # Set by conftest.py with --all.

PAIRS = {
    "test_attention_ops::test_nan_and_infinity_give_what_pyg_gives",
}

EVERY = {
    "test_attention::test_models_are_exact": 2,
    "test_attention_ops::test_keys_and_values_may_lie_among_others": 2,
    "test_balance::test_real_graphs_are_within_the_limit": 3,
    "test_bipartite::test_bipartite_layers_equal_one_process": 2,
    "test_bounded_partitioning::test_kernels_decide_as_plain_loops_do": 2,
    "test_calls::test_a_steady_call_runs_little_python": 2,
    "test_changed_layers::test_a_changed_layer_is_right_or_refused": 2,
    "test_cli::test_own_models_and_metrics_are_those_of_one_process": 3,
    "test_compiled::test_functions_compile_once_for_all_sizes": 2,
    "test_compiled::test_layers_compile_as_pygs": 3,
    "test_compiled::test_models_of_workers_stay_as_they_are": 2,
    "test_contract::test_rule_6_ties": 2,
    "test_contract_sweep::test_uses": 5,
    "test_coverage::test_case": 22,
    "test_dependence::test_what_is_fetched_and_computed_again": 2,
    "test_embedding::test_training_equals_one_process": 2,
    "test_exactness::test_five_steps_of_training": 3,
    "test_exactness::test_world_sizes_and_partitioners": 4,
    "test_failures::test_operations_that_differ": 2,
    "test_fused_attention::test_layers_equal_pyg": 2,
    "test_fused_attention::test_the_backward_pass_sees_the_same_mask": 2,
    "test_graphs::test_real_archives": 3,
    "test_hand_written::test_products_equal_to_one_process": 2,
    "test_hetero::test_models_equal_one_process": 2,
    "test_hetero::test_relational_layers_equal_one_process": 2,
    "test_hetero_storage::test_real_graphs": 2,
    "test_hosting::test_the_same_to_the_bit_for_any_number_of_workers": 2,
    "test_kernel_layers::test_layers_are_exact_with_kernels_and_without": 2,
    "test_larger_than_memory::test_exact_in_a_fourth_of_the_memory": 8,
    "test_ledger::test_no_preprocessing_after_the_first_epoch": 4,
    "test_ledger::test_resident_rows_in_mode_1": 2,
    "test_lightning::test_a_module_trains_as_in_one_process": 2,
    "test_loading::test_wrong_world_size": 3,
    "test_local_peers::test_killed_worker_leaves_nothing": 2,
    "test_message_flow::test_outputs_gradients_and_rows": 4,
    "test_message_flow::test_the_command_takes_them_where_they_pay": 2,
    "test_message_norms::test_norms_inside_messages": 4,
    "test_models::test_models_are_exact": 4,
    "test_norm::test_equal_to_one_process": 2,
    "test_norm::test_kernels_of_norms": 2,
    "test_operators::test_every_operator_is_right_or_refused": 2,
    "test_pager::test_a_real_crash_stays_a_crash": 4,
    "test_pool::test_readouts_are_exact": 4,
    "test_pushed_attention::test_layers_equal_pyg": 2,
    "test_random_layers::test_as_one_process_draws_and_as_any_number_of_workers": 6,
    "test_random_messages::test_random_messages": 8,
    "test_random_numbers::test_same_is_what_one_process_draws": 2,
    "test_recipes::test_each_recipe_on_workers": 2,
    "test_replicate::test_a_trainer_on_the_samples_of_all_replicas": 4,
    "test_replicate::test_norms_over_all_replicas": 3,
    "test_replicate::test_replicas_train_as_one_process_that_averages": 3,
    "test_results::test_loss_curve_and_accuracy_of_plain_pyg": 3,
    "test_scatter::test_training_on_many_graphs_equals_one_process": 3,
    "test_shared_memory::test_layers_are_exact": 3,
    "test_transform_first::test_exact": 2,
    "test_workers_alike::test_plain_tensors_that_differ": 2,
}

LONG = {
    "test_bounded_partitioning::test_the_limit_holds_for_a_folder_several_times_as_large",
    "test_checkpoint::test_torchrun_starts_lost_workers_again",
    "test_cli::test_under_torchrun_a_mistake_is_one_line",
    "test_examples::test_a_lightning_module_learns",
    "test_examples::test_larger_than_memory_stays_within_its_limit",
    "test_examples::test_quickstart_learns",
    "test_failures::test_environment_set_by_hand",
    "test_graphs::test_synthetic_of_two_hundred_thousand_nodes_and_ten_million_edges",
    "test_larger_than_memory::test_a_report_says_what_was_kept_and_moved",
    "test_larger_than_memory::test_parts_without_edges_between_take_their_turns_in_order",
    "test_link_prediction::test_the_example_shows_one_curve",
    "test_pretended_gpu::test_it_refuses_what_a_gpu_refuses",
    "test_pretended_gpu::test_what_runs_on_gpus_runs_there",
    "test_pushed::test_messages_are_made_when_it_is_their_turn",
    "test_random_layers::test_processes_draw_alike_where_rows_travel_and_where_they_are_read",
    "test_random_layers::test_the_kernels_compute_what_they_compute_without",
    "test_recipes::test_each_recipe_on_eight_parts_of_two_workers",
    "test_resume::test_the_hosts_that_are_left_go_on_with_all_parts",
    "test_shared_memory::test_processes_on_one_host_on_two_and_apart",
}


OF_PROCESSES = {
    "test_alignment",
    "test_devices",
    "test_loading",
    "test_memory",
    "test_metrics",
    "test_outside",
    "test_posts",
    "test_random_messages",
    "test_random_models",
    "test_replaced_code",
    "test_replicas",
    "test_wire",
    "test_workers_alike",
}
"""Files whose workers are processes in each test, which are about what these send or hold."""


def everything() -> bool:
    """Says if all combinations are asked for."""
    return SWITCH in os.environ


def some(values: Sequence[T], key: str, step: int = 0) -> Sequence[T]:
    """Every ``step``-th of the values, others for another key; by default one or two of them."""
    step = step or (1 if len(values) < 3 else 3 if len(values) < 5 else 4)
    step = 1 if everything() else step
    return values[crc32(key.encode()) % step :: step]


def in_turn(given: Sequence[Sequence[T]], start: int = 0) -> list[Sequence[T]]:
    """Each one's share of its values, at least one; those of the same values try all of them.

    Of a hundred layers each runs by one policy, the next layer by the next one; one layer by all.
    """
    found = []
    for k, values in enumerate(given):
        step = 1 if everything() else min(list(given).count(values), len(values))
        found.append(values[(list(given[:k]).count(values) + start) % step :: step])
    return found


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that `make test` goes without."""
    if everything():
        return []
    same: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            same[f"{item.path.stem}::{item.originalname}"].append(item)
    found = [i for i in items if f"{i.path.stem}::{getattr(i, 'originalname', '')}" in LONG]
    for name in PAIRS & same.keys():
        taken = covering([item.callspec.indices for item in same[name]])
        found += [item for k, item in enumerate(same[name]) if k not in taken]
    for name in EVERY.keys() & same.keys():
        found += [item for k, item in enumerate(reversed(same[name])) if k % EVERY[name]]
    return found


def covering(rows: Sequence[dict[str, int]]) -> set[int]:
    """Numbers of rows, few of them, that have every pair of values that any row has."""
    pairs: list[set[Any]] = [set(combinations(sorted(row.items()), 2)) for row in rows]
    missing = set().union(*pairs)
    taken: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda k: (len(pairs[k] & missing), -k))
        taken.add(best)
        missing -= pairs[best]
    return taken or set(range(len(rows)))
