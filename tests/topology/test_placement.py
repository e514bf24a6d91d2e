"""Placement: each rank on a device of its own, where the scenario says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from exatwin.topology.errors import InputError
from exatwin.topology.machine import load_machine
from exatwin.topology.placement import ORDERS, Placement, PlacementSpec, build_placement, crossings

from .small import fat_tree, torus


def placed(name, tp, dp, pp, **spec):
    machine = load_machine(name) if isinstance(name, str) else name
    return build_placement(PlacementSpec(**spec), machine, tp, dp, pp)


def refused(name, tp, dp, pp, **spec):
    with pytest.raises(InputError) as caught:
        placed(name, tp, dp, pp, **spec)
    return str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ORDERS), st.integers(1, 8), st.integers(1, 6), st.integers(1, 5), st.permutations(range(8)))
def test_every_rank_has_a_device_and_the_first_axis_varies_fastest(order, tp, dp, pp, devices):
    degree = {"tp": tp, "dp": dp, "pp": pp}
    placement = Placement(tp, dp, pp, 8, order=order)
    grid = placement.grid()
    assert grid.shape == (pp, dp, tp)
    assert sorted(grid.ravel().tolist()) == list(range(tp * dp * pp))
    stride, axes = 1, {"pp": 0, "dp": 1, "tp": 2}
    for axis in order.split("-"):
        if degree[axis] > 1:
            assert set(np.diff(grid, axis=axes[axis]).ravel().tolist()) == {stride}
        stride *= degree[axis]
    turned = Placement(tp, dp, pp, 8, order=order, device_order=tuple(devices)).grid()
    assert (turned // 8 == grid // 8).all()
    assert (turned % 8 == np.array(devices)[grid % 8]).all()


def test_the_default_is_what_it_was():
    placement = placed("frontier", 8, 6, 64)
    assert placement == Placement(8, 6, 64, 8)
    assert placement.node_ids.tolist() == list(range(384))
    assert placed("frontier", 8, 6, 64, device_order=list(range(8))) == placement


def test_groups_of_a_contiguous_job_are_told_by_what_they_leave():
    machine = load_machine("frontier")
    assert crossings(placed(machine, 8, 6, 64), machine) == [
        "data-parallel groups span 6 nodes and 1 to 2 dragonfly groups",
        "pipelines span 64 nodes and 3 dragonfly groups",
    ]
    assert crossings(placed(machine, 16, 1, 1), machine) == [
        "tensor-parallel groups span 2 nodes and 1 dragonfly group"
    ]
    assert crossings(placed(machine, 8, 1, 1), machine) == []
    assert crossings(placed(machine, 8, 6, 64, order="tp-pp-dp"), machine) == [
        "data-parallel groups span 6 nodes and 3 dragonfly groups",
        "pipelines span 64 nodes and 1 dragonfly group",
    ]
    fugaku = load_machine("fugaku")
    assert crossings(placed(fugaku, 6, 2, 8), fugaku)[0] == "tensor-parallel groups span 6 nodes"


def test_a_spread_job_has_as_many_nodes_in_each_group_as_can_be():
    machine = load_machine("frontier")
    placement = placed(machine, 8, 6, 64, nodes="spread")
    held = np.bincount(machine.fabric.groups_of(placement.node_ids), minlength=77)
    assert set(held.tolist()) == {4, 5}
    assert held.sum() == 384
    assert (np.diff(placement.node_ids) > 0).all()
    six = placed(machine, 8, 6, 64, nodes="spread", groups=6)
    assert np.bincount(machine.fabric.groups_of(six.node_ids)).tolist() == [64] * 6
    whole = placed(machine, 8, 9856 // 64, 64, nodes="spread")
    assert whole.node_ids.tolist() == list(range(9856))
    leaves = fat_tree(12, 4, 2)
    assert placed(leaves, 1, 5, 1, nodes="spread").node_ids.tolist() == [0, 1, 4, 5, 8]


def test_a_node_list_comes_from_the_scenario_or_a_file(tmp_path):
    file = tmp_path / "nodes.txt"
    file.write_text("# my allocation\n12-14\n\n900  # far away\n", encoding="utf-8")
    spec = PlacementSpec(node_file="nodes.txt").with_nodes_read(tmp_path)
    assert spec.nodes == (12, 13, 14, 900)
    assert spec.node_file is None
    placement = build_placement(spec, load_machine("frontier"), 8, 4, 1)
    assert placement.node_ids.tolist() == [12, 13, 14, 900]
    assert placed("frontier", 8, 4, 1, node_file=str(file)) == placement
    assert placement.routes(load_machine("frontier")).name(0) == "node 12 GCD 0 -> GCD 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty|names no node"),
        ("# none\n", "names no node"),
        ("1\ntwo\n", "line 2: 'two' is no node number and no range; write 12 or 12-19"),
        ("9-3\n", "line 1: '9-3' is no node number and no range"),
        ("-4\n", "line 1: '-4'"),
        ("0-999999999\n", "line 1: names more than 1000000 nodes"),
    ],
)
def test_a_node_file_names_the_line_that_is_wrong(tmp_path, text, said):
    file = tmp_path / "nodes.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        PlacementSpec(node_file=str(file)).with_nodes_read()
    with pytest.raises(InputError, match="no such file"):
        PlacementSpec(node_file=str(tmp_path / "none.txt")).with_nodes_read()


def test_a_torus_job_has_the_shape_it_asks_for():
    cube = placed("fugaku", 6, 288, 8)
    assert cube.shape == (24, 24, 24)
    slab = placed("fugaku", 6, 288, 8, shape=[48, 6, 48])
    assert slab.shape == (48, 6, 48)
    assert slab.routes(load_machine("fugaku")).torus_shape == (48, 6, 48)
    assert len(set(slab.node_ids.tolist())) == 13_824
    odd = placed("fugaku", 1, 81, 1)  # 9 x 9 cannot be laid without detours: a torus all the same, on nodes unknown
    assert odd.shape == (9, 9, 1)
    grid = placed(torus((4, 4, 2), (True, True, False)), 1, 8, 1)
    assert sorted(grid.shape) == [2, 2, 2]
    listed = placed("fugaku", 1, 3, 1, nodes=[0, 5, 700])
    assert listed.shape is None
    routes = listed.routes(load_machine("fugaku"))
    assert routes.fabric_hops(np.array([0]), np.array([1])).tolist() == [2]  # node 5 has a = 1 and b = 2


@pytest.mark.parametrize(
    ("name", "ranks", "spec", "said"),
    [
        ("frontier", (8, 6, 64), {"order": "tp-pp-pd"}, "placement.order: unknown order 'tp-pp-pd'; did you mean tp-"),
        ("frontier", (8, 1, 1), {"order": "fastest"}, "known: tp-dp-pp, tp-pp-dp"),
        ("frontier", (8, 1, 1), {"device_order": [0, 1, 2, 3]}, "each of the 8 GCDs of a node once, 0 to 7"),
        ("frontier", (8, 1, 1), {"device_order": [0, 1, 2, 3, 4, 5, 6, 6]}, "placement.device_order"),
        ("frontier", (8, 10_000, 1), {}, "80000 ranks are more than the 78848 GCDs of frontier"),
        ("frontier", (8, 2, 1), {"nodes": [3, 3]}, "placement.nodes: 3 stands more than once"),
        ("frontier", (8, 2, 1), {"nodes": [3, 9856]}, "frontier has nodes 0 to 9855, and no 9856"),
        ("frontier", (8, 3, 1), {"nodes": [3, 4]}, "lists 2 nodes, but the ranks fill 3 of 8 GCDs; list 3, or run 16"),
        ("frontier", (8, 2, 1), {"groups": 2}, "placement.groups: goes with nodes: spread"),
        ("frontier", (8, 2, 1), {"nodes": "spread", "groups": 78}, "78 is more than the 77 dragonfly groups"),
        ("frontier", (8, 2, 1), {"nodes": "spread", "groups": 3}, "2 nodes cannot be spread over 3"),
        ("frontier", (8, 300, 1), {"nodes": "spread", "groups": 2}, "hold 256 nodes, but the job has 300; at least 3"),
        ("frontier", (8, 2, 1), {"shape": [2, 1, 1]}, "is for a torus; the fabric of frontier is a dragonfly"),
        ("fugaku", (1, 12, 1), {"nodes": "spread"}, "which a torus has none of"),
        ("fugaku", (1, 12, 1), {"shape": [4, 3]}, "4x3 has 2 axes; a job here has 3; nearest: "),
        ("fugaku", (1, 12, 1), {"shape": [2, 3, 3]}, "2x3x3 makes 18 nodes, but the job has 12; nearest: 2x2x3, 2x3x2"),
        ("fugaku", (1, 12, 1), {"shape": [3, 1, 4]}, None),
        ("fugaku", (1, 27, 1), {"shape": [3, 3, 3]}, "3x3x3 cannot be laid on 24x23x24x2x3x2 without detours"),
        ("fugaku", (1, 12, 1), {"shape": [12, 1, 1], "nodes": list(range(12))}, "is for contiguous nodes"),
    ],
)
def test_what_cannot_be_is_said_with_what_can(name, ranks, spec, said):
    if said is None:
        placed(name, *ranks, **spec)
    else:
        assert said in refused(name, *ranks, **spec)


@pytest.mark.parametrize(
    "spec",
    [{"nodes": "random"}, {"nodes": [1, -2]}, {"nodes": [True]}, {"shape": [0]}, {"groups": 0}, {"ordr": "tp-dp-pp"}],
)
def test_a_spec_of_the_wrong_form_is_refused(spec):
    with pytest.raises(ValidationError):
        PlacementSpec(**spec)


def test_everything_wrong_is_said_at_once():
    said = refused("frontier", 8, 2, 1, order="x", device_order=[1], groups=3)
    assert said.startswith("3 problems")


expert_cuts = st.tuples(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 3)
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ORDERS), expert_cuts, st.integers(1, 3))
def test_expert_groups_share_out_the_ranks_of_each_stage(order, cut, pp):
    """Expert, tensor and copy ranks are three axes of a stage: groups of two kinds meet in one rank."""
    ep, etp, more, copies = cut
    tp, dp = etp * more, ep * copies
    placement = Placement(tp, dp, pp, 8, order=order)
    stages = {int(device): stage for stage, part in enumerate(placement.grid()) for device in part.reshape(-1)}
    kinds = [
        (ep, placement.expert_groups(ep, etp)),
        (etp, placement.expert_tensor_groups(etp)),
        (tp * dp // (ep * etp), placement.expert_data_groups(ep, etp)),
    ]
    for size, groups in kinds:
        assert groups.shape == (tp * dp * pp // size, size)
        assert sorted(groups.reshape(-1).tolist()) == list(range(tp * dp * pp))
        assert all(len({stages[int(device)] for device in group}) == 1 for group in groups)
    sets = [[frozenset(row) for row in groups.tolist()] for _, groups in kinds]
    for first, second in itertools.combinations(sets, 2):
        assert all(len(one & other) <= 1 for one in first for other in second)


@given(expert_cuts)
def test_experts_cut_as_the_rest_are_spread_over_neighbouring_replicas(cut):
    ep, tp, _, copies = cut
    placement = Placement(tp, ep * copies, 2, 8)
    groups = {tuple(row) for row in placement.expert_groups(ep, tp).tolist()}
    assert groups == {tuple(row) for row in placement.replica_groups(ep).tolist()}
    data = {tuple(row) for row in placement.expert_data_groups(ep, tp).tolist()}
    assert data == {tuple(row) for row in placement.replica_groups(copies, ep).tolist()}


def test_context_and_expert_groups_that_leave_a_node_are_told():
    machine = load_machine("dgx-h100")
    said = crossings(placed(machine, 8, 4, 1), machine, cp=2, ep=4)
    assert "context-parallel groups span 2 nodes" in said[1]
    assert "expert-parallel groups span 4 nodes" in said[2]
    assert not [one for one in crossings(placed(machine, 2, 4, 1), machine, cp=2, ep=4) if "expert" in one]
