"""Routes use links that exist, as many as the shortest way needs, and what leaves a node passes its NICs."""

from __future__ import annotations

import itertools
from functools import cache

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exatwin.topology.graph import node_graph
from exatwin.topology.machine import load_machine, machine_names
from exatwin.topology.routing import AT_NIC, IN_FABRIC, IN_NODE, Routes, near_cube, node_routes, ring_orders

machine = cache(load_machine)
PAIRS = list(itertools.permutations(range(8), 2))
EIGHT = ["frontier", "lumi-g", "selene", "dgx-h100"]


@cache
def routes(name, nodes):
    return Routes(machine(name), nodes)


def taken(some, source, target, **how):
    """Links and shares of one message."""
    hops = some.route(np.array([source]), np.array([target]), **how)
    return dict(zip(hops.link.tolist(), hops.share.tolist(), strict=True))


def where(some, links):
    return [int(some.place[link]) for link in links]


# Inside a node


def devices_of(name):
    graph = node_graph(machine(name))
    return graph.subgraph([vertex for vertex, kind in graph.nodes(data="kind") if kind != "nic"])


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_a_way_inside_a_node_follows_cables_and_is_a_shortest_one(name):
    node, graph = node_routes(machine(name)), devices_of(name)
    ends = {}  # each cable's link is the whole way between its ends
    for a, b in PAIRS:
        if graph.has_edge(("device", a), ("device", b)):
            (link,) = node.path[a][b]
            assert node.capacity[link] == graph.edges[("device", a), ("device", b)]["bandwidth_bytes_per_s"]
            assert ends.setdefault(link, (a, b)) == (a, b)
    for a, b in PAIRS:
        way = [ends[link] for link in node.path[a][b]]
        assert way[0][0] == a
        assert way[-1][1] == b
        assert all(here[1] == there[0] for here, there in itertools.pairwise(way))
        assert len(way) == nx.shortest_path_length(graph, ("device", a), ("device", b))


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_of_the_shortest_ways_the_widest_is_taken(name):
    node, graph = node_routes(machine(name)), devices_of(name)
    for a, b in PAIRS:
        ways = nx.all_shortest_paths(graph, ("device", a), ("device", b))
        widths = [min(graph.edges[edge]["bandwidth_bytes_per_s"] for edge in itertools.pairwise(way)) for way in ways]
        assert min(node.capacity[link] for link in node.path[a][b]) == max(widths)


@pytest.mark.parametrize("name", ["selene", "dgx-h100"])
def test_a_way_through_a_switch_goes_up_once_and_down_once(name):
    node = node_routes(machine(name))
    up, down = {a: set() for a in range(8)}, {a: set() for a in range(8)}
    for a, b in PAIRS:
        first, second = node.path[a][b]
        assert node.capacity[first] == node.capacity[second] == machine(name).node.switch_bandwidth.value
        up[a].add(first)
        down[b].add(second)
    assert all(len(links) == 1 for links in (*up.values(), *down.values()))
    assert len(set.union(*up.values(), *down.values())) == 16


@pytest.mark.parametrize("name", machine_names())
def test_a_device_reaches_the_fabric_through_the_nearest_nic(name):
    node, graph = node_routes(machine(name)), node_graph(machine(name))
    nics = machine(name).node.nics
    for device in range(node.devices):
        away = [nx.shortest_path_length(graph, ("device", device), ("nic", nic.name)) for nic in nics]
        chosen = node.nic_out.index(node.exit[device][-1])
        assert node.nic_in.index(node.entry[device][0]) == chosen
        assert away[chosen] == min(away)


def test_on_frontier_each_module_shares_the_nic_of_its_second_gcd():
    node = node_routes(machine("frontier"))
    assert [node.nic_out.index(way[-1]) for way in node.exit] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [len(way) for way in node.exit] == [2, 1] * 4  # the first GCD crosses the module to get there
    assert node.exit[0][:-1] == node.path[0][1]
    assert node.entry[0][1:] == node.path[1][0]


# Between nodes


@pytest.mark.parametrize("name", EIGHT)
def test_what_leaves_a_node_passes_one_nic_out_and_one_in(name):
    some = routes(name, 3)
    width = len(some.node.capacity)
    for a, b in itertools.product(range(8), repeat=2):
        links = taken(some, a, 16 + b)
        nics = [link for link in links if some.place[link] == AT_NIC]
        assert sorted(nics) == sorted([some.node.exit[a][-1], 2 * width + some.node.entry[b][0]])
        assert set(links.values()) == {1.0}
        assert {link // width for link in links} == {0, 2}


@pytest.mark.parametrize("name", EIGHT)
def test_a_message_that_spreads_uses_a_share_of_every_nic(name):
    some = routes(name, 2)
    node = some.node
    width, count = len(node.capacity), len(node.nic_out)
    links = taken(some, 3, 12, spread=True)
    assert links == dict.fromkeys([*node.nic_out, *(width + link for link in node.nic_in)], 1 / count)


@pytest.mark.parametrize("name", EIGHT)
@given(data=st.data())
def test_shares_of_a_message_at_the_nics_add_up_to_one_way_out_and_one_way_in(name, data):
    some = routes(name, 6)
    source, target = data.draw(st.integers(0, 47)), data.draw(st.integers(0, 47))
    links = taken(some, source, target, spread=data.draw(st.booleans()))
    at_nics = sum(share for link, share in links.items() if some.place[link] == AT_NIC)
    assert at_nics == pytest.approx(0.0 if source // 8 == target // 8 else 2.0)


@pytest.mark.parametrize(("name", "group"), [("frontier", 128), ("lumi-g", 124), ("selene", 20), ("dgx-h100", 32)])
def test_only_what_leaves_its_group_uses_the_links_between_groups(name, group):
    some = routes(name, 3 * group)
    near, far = taken(some, 0, 8 * (group - 1)), taken(some, 0, 8 * 2 * group)
    assert IN_FABRIC not in where(some, near)
    out, into = [link for link in far if some.place[link] == IN_FABRIC]
    fabric = machine(name).fabric
    limit = fabric.global_bytes_per_s() if fabric.kind == "dragonfly" else group * fabric.link_bandwidth.value * 8
    assert some.capacity[out] == some.capacity[into] == pytest.approx(limit)
    back = taken(some, 8 * 2 * group, 0)
    assert not {out, into} & set(back)  # each direction has links of its own
    assert some.fabric_hops(np.array([0, 0, 0]), np.array([1, 8, 16 * group])).tolist() == [0, 1, 3]


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_nodes_of_one_dragonfly_group_never_use_the_links_between_groups(name):
    """The last group takes the nodes that are left over."""
    whole = machine(name)
    some = routes(name, whole.node_count)
    group = np.array([whole.fabric.group_of(node) for node in range(whole.node_count)])
    node = np.arange(whole.node_count - 1)
    hops = some.route(8 * node, 8 * (node + 1))
    leaving = np.unique(hops.message[some.place[hops.link] == IN_FABRIC])
    assert leaving.tolist() == np.flatnonzero(group[:-1] != group[1:]).tolist()


@pytest.mark.parametrize("name", machine_names())
@given(data=st.data(), spread=st.booleans())
@settings(max_examples=30)
def test_messages_routed_together_go_as_they_would_alone(name, data, spread):
    some = routes(name, 37)
    device = st.integers(0, 37 * machine(name).devices_per_node - 1)
    messages = data.draw(st.lists(st.tuples(device, device), min_size=1, max_size=20))
    source, target = np.array(messages).T
    together = some.route(source, target, spread=spread)
    for index, (a, b) in enumerate(messages):
        mine = together.message == index
        assert dict(zip(together.link[mine].tolist(), together.share[mine].tolist(), strict=True)) == taken(
            some, a, b, spread=spread
        )


@pytest.mark.parametrize("name", machine_names())
def test_every_link_has_a_place_and_a_capacity(name):
    some = routes(name, 40)
    assert len(some.capacity) == len(some.place)
    assert (some.capacity > 0).all()
    node = machine(name).node
    assert (some.place == AT_NIC).sum() == 40 * 2 * node.nic_count
    inside = {"point_to_point": 2 * len(node.links), "switched": 2 * node.devices, "single": 0}[node.kind]
    assert (some.place == IN_NODE).sum() == 40 * inside


@pytest.mark.parametrize("name", machine_names())
def test_a_message_to_oneself_uses_no_link(name):
    assert taken(routes(name, 4), 2, 2) == {}


# The torus


@pytest.mark.parametrize("nodes", [1, 2, 6, 8, 12, 27, 48, 60])
def test_a_torus_route_is_as_long_as_the_shortest_way(nodes):
    some = routes("fugaku", nodes)
    shape = some.torus_shape
    place = [(n % shape[0], n // shape[0] % shape[1], n // (shape[0] * shape[1])) for n in range(nodes)]
    away = dict(nx.all_pairs_shortest_path_length(nx.grid_graph(shape[::-1], periodic=True)))
    source, target = (side.ravel() for side in np.meshgrid(range(nodes), range(nodes), indexing="ij"))
    hops = some.route(source, target)
    long = np.bincount(hops.message[some.place[hops.link] == IN_FABRIC], minlength=nodes * nodes)
    expected = [away[place[a]][place[b]] for a, b in zip(source, target, strict=True)]
    assert long.tolist() == some.fabric_hops(source, target).tolist() == expected


@given(st.integers(2, 200), st.data())
def test_a_torus_route_goes_axis_by_axis_from_neighbour_to_neighbour(nodes, data):
    some = Routes(machine("fugaku"), nodes)
    source, target = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, nodes - 1))
    base = nodes * len(some.node.capacity)
    shape = some.torus_shape
    at = [source % shape[0], source // shape[0] % shape[1], source // (shape[0] * shape[1])]
    axes = []
    for link in [link for link in taken(some, source, target) if link >= base]:
        node, direction = divmod(link - base, 6)
        assert node == at[0] + shape[0] * (at[1] + shape[1] * at[2])
        axes.append(direction // 2)
        at[axes[-1]] = (at[axes[-1]] + (1, -1)[direction % 2]) % shape[axes[-1]]
    assert axes == sorted(axes)
    assert at[0] + shape[0] * (at[1] + shape[1] * at[2]) == target


def test_a_shift_along_a_ring_of_the_torus_loads_each_of_its_links_alike():
    some = routes("fugaku", 64)
    source = np.arange(64)
    hops = some.route(source, source // 4 * 4 + (source + 1) % 4)
    links = hops.link[some.place[hops.link] == IN_FABRIC]
    assert len(links) == len(set(links.tolist())) == 64


def test_neighbours_in_different_directions_use_different_interfaces():
    some = routes("fugaku", 64)
    nics = []
    for neighbour in (1, 3, 4, 12, 16, 48):  # of node 0 in a torus of 4 x 4 x 4
        (out,) = [link for link in taken(some, 0, neighbour) if link in some.node.nic_out]
        nics.append(out)
    assert len(set(nics)) == 6


@given(st.integers(1, 3000))
@example(72)
@example(1536)
def test_a_job_gets_a_torus_as_near_to_a_cube_as_its_nodes_allow(nodes):
    boxes = [
        (nodes // (y * z), y, z)
        for z in range(1, round(nodes ** (1 / 3)) + 1)
        if nodes % z == 0
        for y in range(z, int((nodes // z) ** 0.5) + 1)
        if nodes // z % y == 0
    ]
    assert near_cube(nodes) == min(boxes)  # the least longest side, then the least second


# Rings


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
@pytest.mark.parametrize("width", [4, 8])
def test_a_ring_of_neighbours_closes_over_cables_that_exist(name, width):
    graph = devices_of(name)
    for first in range(0, 8, width):
        group = tuple(range(first, first + width))
        for order in ring_orders(machine(name), group):
            assert sorted(order) == list(group)
            assert all(graph.has_edge(("device", a), ("device", b)) for a, b in itertools.pairwise((*order, order[0])))


def test_the_rings_of_a_whole_frontier_node_never_share_a_thin_cable():
    edges = [
        frozenset(pair)
        for order in ring_orders(machine("frontier"), tuple(range(8)))
        for pair in itertools.pairwise((*order, order[0]))
    ]
    thin = [edge for edge in edges if machine("frontier").node.link_count(*edge) == 1]
    assert len(thin) == len(set(thin))


@pytest.mark.parametrize("name", machine_names())
@given(st.data())
def test_a_ring_visits_each_member_once(name, data):
    per_node = machine(name).devices_per_node
    group = data.draw(st.sets(st.integers(0, per_node - 1), min_size=1, max_size=6))
    for order in ring_orders(machine(name), tuple(sorted(group))):
        assert sorted(order) == sorted(group)
