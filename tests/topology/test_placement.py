"""Which device each rank runs on: Megatron's order, tensor parallel fastest and stages slowest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.topology.placement import Placement

degrees = st.integers(1, 12)
placements = st.builds(Placement, tp=degrees, dp=degrees, pp=degrees, devices_per_node=st.sampled_from([1, 4, 8]))


@given(placements)
def test_every_rank_has_a_device_of_its_own(placement):
    grid = placement.grid()
    assert grid.shape == (placement.pp, placement.dp, placement.tp)
    assert sorted(grid.ravel()) == list(range(placement.ranks))
    assert grid.max() // placement.devices_per_node == placement.nodes - 1


@given(placements)
def test_groups_of_a_kind_share_out_the_devices(placement):
    tensor = placement.tensor_groups()
    assert tensor.shape == (placement.dp * placement.pp, placement.tp)
    assert sorted(tensor.ravel()) == list(range(placement.ranks))
    data = np.concatenate([placement.data_groups(stage) for stage in range(placement.pp)])
    assert data.shape == (placement.tp * placement.pp, placement.dp)
    assert sorted(data.ravel()) == list(range(placement.ranks))


@given(placements)
def test_a_tensor_group_and_a_data_group_meet_in_one_device(placement):
    for stage in range(placement.pp):
        for data in placement.data_groups(stage):
            for tensor in placement.grid()[stage]:
                assert len(np.intersect1d(data, tensor)) == 1


@pytest.mark.parametrize(
    ("tp", "devices_per_node", "crosses"),
    [(1, 1, False), (2, 1, True), (8, 8, False), (4, 8, False), (1, 8, False), (3, 8, True), (9, 8, True)],
)
def test_a_tensor_group_leaves_its_node_where_its_width_does_not_divide_it(tp, devices_per_node, crosses):
    assert Placement(tp, 4, 4, devices_per_node).tensor_group_crosses_nodes() is crosses


def test_the_trillion_parameter_run_takes_384_nodes_and_keeps_tensor_groups_inside():
    placement = Placement(tp=8, dp=6, pp=64, devices_per_node=8)
    assert (placement.ranks, placement.nodes) == (3072, 384)
    assert not placement.tensor_group_crosses_nodes()
    assert placement.data_groups(0)[0].tolist() == [0, 8, 16, 24, 32, 40]


def test_a_job_smaller_than_a_node_takes_a_part_of_one():
    assert Placement(tp=2, dp=1, pp=1, devices_per_node=8).nodes == 1
