"""Routes: as long as a graph's, over links that add up to what the machine has."""

from __future__ import annotations

import itertools
import math
import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exatwin.topology.errors import InputError
from exatwin.topology.fabrics.torus import tofu_embedding
from exatwin.topology.faults import Fault
from exatwin.topology.graph import fabric_graph
from exatwin.topology.machine import load_machine
from exatwin.topology.routing import AT_NIC, IN_FABRIC, Routes, ring_orders

from .small import dragonfly, fat_tree, torus

few = settings(max_examples=25, deadline=None)


def every_pair(routes):
    devices = routes.nodes * routes.node.devices
    pairs = np.array(list(itertools.permutations(range(devices), 2)), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def load(routes, hops):
    """Seconds a byte on each link while every message sends at once."""
    return np.bincount(hops.link, hops.share, len(routes.capacity)) / routes.capacity


def names(routes, hops, message=0):
    return [routes.name(int(link)) for link in hops.link[hops.message == message]]


def one(routes, source, target, **how):
    return routes.route(np.array([source]), np.array([target]), **how)


# Lengths against a graph.


@few
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
)
def test_ways_through_a_dragonfly_are_as_long_as_the_graphs_within_two_groups(groups, switches, nodes, links, ports):
    nics, beside = ports
    if beside > switches or (switches * nodes * nics) % nics or switches % beside:
        return
    machine = dragonfly(groups, switches, nodes * nics, links, nics, beside)
    graph = fabric_graph(machine)
    routes = Routes(machine, machine.node_count)
    source, target = every_pair(routes)
    hops = routes.fabric_hops(source, target)
    fabric = machine.fabric
    per_node = machine.devices_per_node
    exits = np.array(routes.node.exit_nic)
    for a, b, found in list(zip(source.tolist(), target.tolist(), hops.tolist(), strict=True))[:400]:
        if a // per_node == b // per_node:
            assert found == 0
            continue
        ends = []
        for device in (a, b):
            node = np.array([device // per_node])
            switch = fabric.switches_of(node, exits[[device % per_node]], nics)[0]
            ends.append((fabric.group_of(device // per_node), int(switch)))
        two = graph.subgraph(vertex for vertex in graph if vertex[0] in (ends[0][0], ends[1][0]))
        assert found == nx.shortest_path_length(two, *ends)


@few
@given(st.integers(1, 3), st.integers(2, 14), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_ways_through_a_fat_tree_are_as_long_as_the_graphs(levels, nodes, leaf, rails, pod):
    if levels == 1:
        nodes, rails = min(nodes, leaf), 1
    more = {"leaves_per_pod": pod} if levels == 3 else {}
    machine = fat_tree(nodes, leaf, levels, rails, **more)
    graph = fabric_graph(machine, with_nodes=True)
    routes = Routes(machine, nodes)
    source, target = every_pair(routes)
    hops = routes.fabric_hops(source, target)
    for a, b, found in zip(source.tolist(), target.tolist(), hops.tolist(), strict=True):
        (x, r), (y, t) = divmod(a, rails), divmod(b, rails)
        ends = ("leaf", x // leaf, r), ("leaf", y // leaf, t)
        switches = graph.subgraph(vertex for vertex in graph if vertex[0] != "node")
        assert found == (0 if x == y else nx.shortest_path_length(switches, *ends))


@few
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4))
def test_ways_through_a_torus_are_as_long_as_the_graphs(axes):
    shape, rings = zip(*axes, strict=True)
    if math.prod(shape) < 2 or math.prod(shape) > 130:
        return
    machine = torus(shape, rings)
    graph = fabric_graph(machine, with_nodes=True)
    routes = Routes(machine, machine.node_count, tuple(range(machine.node_count)))
    source, target = every_pair(routes)
    lengths = dict(nx.all_pairs_shortest_path_length(graph))
    expected = [lengths["node", a]["node", b] for a, b in zip(source.tolist(), target.tolist(), strict=True)]
    assert routes.fabric_hops(source, target).tolist() == expected
    hops = routes.route(source, target)
    beyond = hops.message[routes.place[hops.link] == IN_FABRIC]
    assert np.bincount(beyond, minlength=len(source)).tolist() == expected
    # Each link of a way begins where the one before it ends.
    for message in (0, len(source) - 1):
        steps = [name.split(" -> ") for name in names(routes, hops, message) if " -> " in name]
        assert steps[0][0] == f"node {source[message]}"
        assert steps[-1][1] == f"node {target[message]}"
        assert all(a[1] == b[0] for a, b in itertools.pairwise(steps))


@few
@given(st.integers(1, 24), st.integers(1, 69), st.integers(1, 6), st.permutations(range(3)))
def test_neighbours_on_a_job_of_tofu_are_one_cable_apart(x, y, z, order):
    shape = tuple(np.array([2 * x, y, 2 * z])[list(order)].tolist())
    place = tofu_embedding(shape)
    assert place.shape == (*shape, 6)
    assert len(np.unique(place.reshape(-1, 6), axis=0)) == math.prod(shape)
    assert (place < np.array([24, 23, 24, 2, 3, 2])).all()
    for axis in range(3):
        if shape[axis] == 1:
            continue
        apart = np.abs(np.roll(place, -1, axis=axis) - place)
        apart[..., 4] = np.minimum(apart[..., 4], 3 - apart[..., 4])  # b is a ring
        assert (apart.sum(axis=-1) == 1).all()


def test_the_published_jobs_of_fugaku_are_laid_as_published():
    """Jobs of 8x8x8, 16x16x8 and 8x16x16: out along x with a = 0, back with a = 1; b goes 0, 2, 1."""
    for shape in ((8, 8, 8), (16, 16, 8), (8, 16, 16)):
        place = tofu_embedding(shape)
        line = place[:, 0, 0]
        half = shape[0] // 2
        assert line[:, 0].tolist() == [*range(half), *reversed(range(half))]
        assert line[:, 3].tolist() == [0] * half + [1] * half
        assert set(place[0, :, 0, 4].tolist()) == {0, 1, 2}


def test_a_job_of_fugaku_has_machine_nodes_that_are_neighbours():
    machine = load_machine("fugaku")
    routes = Routes(machine, 13_824)
    assert routes.torus_shape == (24, 24, 24)
    assert len(set(routes.numbers.tolist())) == 13_824
    assert routes.name(13_824 * 12) == "node 0 -> node 12"
    across = Routes(machine, 13_824, tuple(routes.numbers.tolist()))  # the same nodes, on the machine's own torus
    source = np.arange(13_824)
    assert across.fabric_hops(source, np.roll(source.reshape(24, 24, 24), -1, axis=2).reshape(-1)).max() == 1


# Capacities.


def test_two_groups_of_frontier_share_100_gb_a_second():
    routes = Routes(load_machine("frontier"), nodes=256)
    assert routes.capacity[256 * 32 + 1] == pytest.approx(100e9)
    assert routes.name(256 * 32 + 1) == "group 0 -> group 1"
    fixed = Routes(routes.machine, 256, non_minimal=0.0)
    source = np.arange(128 * 8)
    busiest = load(fixed, fixed.route(source, source + 1024))
    assert fixed.name(int(busiest.argmax())) == "group 0 -> group 1"
    assert 1 / busiest.max() == pytest.approx(100e9 / 1024)


def test_frontiers_old_size_sends_one_byte_in_1_753_out_of_a_group():
    machine = load_machine("frontier")
    old = machine.model_copy(
        update={
            "nodes": machine.nodes.model_copy(update={"value": 9472}),
            "fabric": machine.fabric.model_copy(
                update={"groups": machine.fabric.groups.model_copy(update={"value": 74})}
            ),
        }
    )
    routes = Routes(old, 9472)
    out = routes.capacity[9472 * 32 + 74 * 74]
    assert 128 * 100e9 / out == pytest.approx(1.753, abs=1e-3)
    # Every node of a group sending out, evenly to all others, is held to 57 GB/s.
    rng = np.random.default_rng(1)
    source = np.repeat(np.arange(128) * 8 + 1, 73)
    target = np.tile(np.arange(1, 74) * 1024, 128) + rng.integers(0, 128, 128 * 73) * 8 + 1
    hops = routes.route(source, target)
    beyond = load(routes, hops)[9472 * 32 :]
    assert 73 / beyond.max() == pytest.approx(out / 128)
    assert out / 128 == pytest.approx(57.03e9, rel=1e-3)


def test_no_cut_through_the_groups_carries_more_than_the_bisection():
    """Each half of the groups sends all it has to the other half: the minimal ways carry the bisection exactly."""
    machine = dragonfly(groups=6, switches=4, endpoints=4, links=2)
    per_group = 16
    routes = Routes(machine, machine.node_count, non_minimal=0.0)
    pairs = [(a, b) for a in range(48) for b in range(48, 96) if a % per_group == b % per_group]
    source, target = np.array(pairs).T
    hops = routes.route(source, target)
    beyond = load(routes, hops)[routes.place == IN_FABRIC]
    rate = 1 / beyond.max()
    across = rate * len(pairs)
    assert across == pytest.approx(3 * 3 * machine.fabric.pair_bytes_per_s())


def test_an_oversubscribed_leaf_is_that_much_thinner_above():
    machine = fat_tree(16, 4, 2, over=2.0)
    routes = Routes(machine, 16)
    source = np.arange(4)
    busiest = load(routes, routes.route(source, source + 8))
    assert routes.name(int(busiest.argmax())) in ("leaf 0 up", "leaf 2 down")
    assert 4 / busiest.max() == pytest.approx(4 * 10e9 / 2)
    assert load(routes, routes.route(np.arange(3), np.arange(1, 4))).max() == pytest.approx(1 / 10e9)  # below one leaf


def test_a_pod_of_a_three_level_tree_has_its_own_oversubscription():
    machine = fat_tree(16, 2, 3, leaves_per_pod=4, core_oversubscription=4)
    routes = Routes(machine, 16)
    busiest = load(routes, routes.route(np.arange(8), np.arange(8, 16)))
    assert {routes.name(int(link)) for link in np.flatnonzero(busiest > 0.99 * busiest.max())} == {
        "spines pod 0 up",
        "spines pod 1 down",
    }
    assert 8 / busiest.max() == pytest.approx(8 * 10e9 / 4)


def test_a_rail_stays_on_its_leaf_and_only_cores_change_rails():
    routes = Routes(load_machine("selene"), nodes=40)
    same, other = one(routes, 0, 20 * 8), one(routes, 0, 20 * 8 + 3)
    assert names(routes, same) == ["node 0 hca0 out", "node 20 hca0 in", "leaf 0 rail 0 up", "leaf 1 rail 0 down"]
    assert names(routes, other)[2:] == [
        "leaf 0 rail 0 up",
        "leaf 1 rail 3 down",
        "spines rail 0 up",
        "spines rail 3 down",
    ]
    assert names(routes, one(routes, 0, 8)) == ["node 0 hca0 out", "node 1 hca0 in"]  # below one leaf


def test_messages_below_one_dragonfly_group_load_the_links_inside_it_where_those_can_fill():
    tight = dragonfly(groups=2, switches=2, endpoints=8, links=1)
    routes = Routes(tight, tight.node_count)
    assert "inside group 0" in names(routes, one(routes, 0, 15))
    wide = Routes(load_machine("frontier"), nodes=2)
    assert names(wide, one(wide, 1, 9)) == ["node 0 hsn0 out", "node 1 hsn0 in"]


# Adaptive routing.


def test_a_crowded_pair_of_groups_sends_what_it_has_too_much_by_the_others():
    """A shift by one group: minimal ways alone leave a pair's bundle as the bottleneck."""
    machine = dragonfly(groups=9, switches=4, endpoints=4, links=1)
    source = np.arange(machine.node_count)
    target = (source + 16) % machine.node_count

    def busiest(share):
        routes = Routes(machine, machine.node_count, non_minimal=share)
        return load(routes, routes.route(source, target)).max()

    balanced = busiest(None)
    tried = [busiest(share) for share in np.linspace(0, 1, 101)]
    assert balanced <= min(tried) + 1e-15
    assert balanced == pytest.approx(min(tried), rel=0.02)
    assert busiest(0.0) == pytest.approx(16 / 10e9)
    assert balanced < busiest(1.0) < busiest(0.0)


def test_messages_with_room_on_their_bundle_take_no_detour():
    routes = Routes(load_machine("frontier"), nodes=256)
    hops = one(routes, 0, 1024)
    assert names(routes, hops)[-3:] == ["group 0 -> group 1", "out of group 0", "into group 1"]
    assert set(hops.share.tolist()) == {1.0}


def test_what_is_under_way_together_is_balanced_together():
    routes = Routes(load_machine("frontier"), nodes=256)
    source = np.arange(64)
    target = source + 1024
    alone = routes.route(source, target, together=np.arange(64))
    crowd = routes.route(source, target)
    bundle = 256 * 32 + 1
    assert alone.share[alone.link == bundle].tolist() == [1.0] * 64
    assert crowd.share[crowd.link == bundle].max() < 0.2  # 64 messages at up to 12.5 GB/s on 100 GB/s


@few
@given(st.integers(3, 6), st.integers(1, 3), st.integers(0, 2**32 - 1), st.one_of(st.none(), st.floats(0, 1)))
def test_every_message_crosses_whole(groups, links, seed, share):
    """Out of its group, into the other's, and on all links once minimally and twice otherwise."""
    machine = dragonfly(groups, 3, 2, links)
    routes = Routes(machine, machine.node_count, non_minimal=share)
    rng = np.random.default_rng(seed)
    source = rng.integers(0, machine.node_count, 40)
    target = rng.integers(0, machine.node_count, 40)
    hops = routes.route(source, target)
    base = machine.node_count * len(routes.node.capacity)
    square = groups * groups
    for message in range(40):
        mine = hops.message == message
        a, b = source[message] // 6, target[message] // 6
        carried = {int(link) - base: part for link, part in zip(hops.link[mine], hops.share[mine], strict=True)}
        if a == b:
            assert all(link < square for link in carried)
            continue
        minimal = carried.get(int(a * groups + b), 0.0)
        assert 0 <= minimal <= 1
        assert carried[square + a] == carried[square + groups + b] == 1
        detour = 1 - minimal
        assert carried.get(square + 2 * groups, 1.0) == pytest.approx(1 + detour)


# Nodes and ports.


def test_a_message_inside_a_node_never_leaves_it():
    routes = Routes(load_machine("frontier"), nodes=3)
    assert names(routes, one(routes, 9, 14)) == ["node 1 GCD 1 -> GCD 0", "node 1 GCD 0 -> GCD 6"]
    assert not len(one(routes, 5, 5).link)


def test_a_spread_message_uses_every_port_alike():
    routes = Routes(load_machine("frontier"), nodes=2)
    hops = one(routes, 0, 8, spread=True)
    ports = hops.share[routes.place[hops.link] == AT_NIC]
    assert ports.tolist() == [0.25] * 8


def test_a_node_list_moves_the_job_and_its_names():
    machine = load_machine("frontier")
    routes = Routes(machine, 2, (130, 9000))
    assert names(routes, one(routes, 1, 9)) == [
        "node 130 hsn0 out",
        "node 9000 hsn0 in",
        "group 1 -> group 70",
        "out of group 1",
        "into group 70",
    ]


def test_a_ring_over_auroras_tiles_uses_direct_links():
    machine = load_machine("aurora")
    (ring,) = ring_orders(machine, tuple(range(12)))
    assert sorted(ring) == list(range(12))
    assert all(machine.node.link_count(a, b) for a, b in itertools.pairwise((*ring, ring[0])))
    assert machine.node.pair_bytes_per_s(0, 1) == pytest.approx(230e9)
    assert machine.node.pair_bytes_per_s(0, 3) == pytest.approx(28e9)


# Faults.


def test_a_degraded_port_carries_that_much_less_both_ways():
    routes = Routes(load_machine("frontier"), 2, faults=(Fault("nic", 0.5, node=1, name="hsn2"),))
    lowered = np.flatnonzero(routes.capacity[:64] < Routes(routes.machine, 2).capacity[:64])
    assert [routes.name(int(link)) for link in lowered] == ["node 1 hsn2 out", "node 1 hsn2 in"]
    assert routes.capacity[lowered].tolist() == [12.5e9] * 2


def test_other_ports_take_over_from_one_that_failed():
    machine = load_machine("frontier")
    routes = Routes(machine, 2, faults=(Fault("nic", 0.0, node=0, name="hsn0"),))
    assert names(routes, one(routes, 1, 9))[:2] == ["node 0 hsn1 out", "node 1 hsn0 in"]
    assert "node 0 GCD 1 -> GCD 3" in names(routes, one(routes, 1, 9))
    spread = one(routes, 1, 9, spread=True)
    out = [n for n in names(routes, spread) if n.endswith("out")]
    assert out == ["node 0 hsn1 out", "node 0 hsn2 out", "node 0 hsn3 out"]
    at_ports = spread.share[routes.place[spread.link] == AT_NIC]
    assert at_ports.sum() == pytest.approx(2)
    dead = tuple(Fault("nic", 0.0, node=0, name=f"hsn{k}") for k in range(4))
    with pytest.raises(InputError, match="node 0 has no way out: no NIC is left"):
        one(Routes(machine, 2, faults=dead), 1, 9)


def test_devices_go_around_a_link_that_failed():
    machine = load_machine("frontier")
    routes = Routes(machine, 2, faults=(Fault("link", 0.0, node=1, ends=(0, 1)),))
    assert names(routes, one(routes, 0, 1)) == ["node 0 GCD 0 -> GCD 1"]
    around = names(routes, one(routes, 8, 9))
    assert len(around) == 3
    assert "node 1 GCD 0 -> GCD 1" not in around
    switched = Routes(load_machine("selene"), 1, faults=(Fault("link", 0.0, node=0, ends=(3, "switch")),))
    with pytest.raises(InputError, match="node 0 has no way from device 3 to device 0"):
        one(switched, 3, 0)


def test_a_failed_bundle_sends_all_by_third_groups():
    machine = load_machine("frontier")
    routes = Routes(machine, 256, faults=(Fault("fabric", 0.0, ends=(0, 1)),))
    hops = one(routes, 0, 1024)
    assert names(routes, hops)[-3:] == ["out of group 0", "into group 1", "all links between groups"]
    assert hops.share[-1] == 2
    whole = Routes(machine, 256)
    assert whole.capacity.sum() - routes.capacity.sum() == pytest.approx(2 * 4 * 100e9)  # and out, in and all
    two = dragonfly(groups=2, switches=2, endpoints=2, links=1)
    broken = Routes(two, 8, faults=(Fault("fabric", 0.0, ends=("group:0", "group:1")),))
    with pytest.raises(InputError, match="group 0 -> group 1 has failed and no other way"):
        one(broken, 0, 7)


def test_a_torus_goes_around_a_cable_that_failed():
    machine = torus((4, 4), (True, True))
    routes = Routes(machine, 16, faults=(Fault("fabric", 0.0, ends=(0, 4)),))
    whole = Routes(machine, 16)
    assert [n for n in names(whole, one(whole, 0, 1)) if "->" in n] == ["node 0 -> node 4"]
    around = [n for n in names(routes, one(routes, 0, 1)) if "->" in n]
    assert len(around) == 3
    line = torus((4,), (False,))
    broken = Routes(line, 4, faults=(Fault("fabric", 0.0, ends=(1, 2)),))
    with pytest.raises(InputError, match="no way leads from node 0 to node 3"):
        one(broken, 0, 3)


def test_a_leaf_cut_off_is_an_error_for_those_who_need_it():
    machine = fat_tree(8, 4, 2)
    routes = Routes(machine, 8, faults=(Fault("fabric", 0.0, ends=("leaf:1:0", "spine")),))
    assert len(one(routes, 4, 5).link) == 2
    with pytest.raises(InputError, match="leaf 1 down has failed"):
        one(routes, 0, 4)


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("frontier", Fault("nic", 0.5, node=77, name="hsn0"), "the job has no node 77; nearest: 0, 1"),
        ("frontier", Fault("nic", 0.5, node=0, name="hsn9"), "a node has no nic hsn9; did you mean hsn"),
        ("frontier", Fault("link", 0.5, node=0, ends=(0, 5)), "device 0 is joined to 1, 6, 2"),
        ("frontier", Fault("fabric", 0.5, ends=(0, 99)), "the groups are 0 to 76; nearest: 74, 75, 76"),
        ("frontier", Fault("fabric", 0.5), "joins two groups"),
        ("frontier", Fault("nic", 1.5, node=0, name="hsn0"), "the factor is between 0 and 1, not 1.5"),
        ("selene", Fault("fabric", 0.5, ends=("leaf:99:0", "spine")), "sets 0 to 27 and rails 0 to 7"),
        ("fugaku", Fault("fabric", 0.5, ends=(0, 13)), "node 13 is not of the job; nearest: 0, 1"),
    ],
)
def test_a_fault_that_names_nothing_is_said_so(name, fault, said):
    with pytest.raises(InputError) as caught:
        _ = Routes(load_machine(name), 2, faults=(fault,)).capacity
    assert said in str(caught.value)


# Speed.


def test_routes_of_all_of_frontier_cost_little():
    """Pipeline messages both ways and data-parallel rings of 75,264 ranks."""
    routes = Routes(load_machine("frontier"), 9408)
    grid = np.arange(75_264).reshape(64, 147, 8)
    boundary = np.repeat(np.arange(63), 147 * 8)
    source, target = grid[:-1].reshape(-1), grid[1:].reshape(-1)
    rings = grid.swapaxes(1, 2).reshape(-1, 147)
    start = time.process_time()
    routes.route(source, target, together=boundary)
    routes.route(target, source, together=boundary)
    routes.route(rings.reshape(-1), np.roll(rings, -1, axis=1).reshape(-1), spread=True)
    assert time.process_time() - start < 1.0  # 0.08 s on an idle machine


def test_a_fabric_of_an_unknown_kind_has_no_routes():
    machine = torus((2,), (True,))
    odd = machine.model_copy(update={"fabric": machine.fabric.model_copy(update={"kind": "star"})})
    with pytest.raises(InputError, match="a fabric of kind star has no routes"):
        _ = Routes(odd, 2).capacity
