"""Machines as graphs: degrees, counts and bandwidths agree with what is published."""

from __future__ import annotations

import time
from collections import Counter

import networkx as nx
import pytest

from exatwin.topology.errors import InputError
from exatwin.topology.fabrics import FABRICS
from exatwin.topology.graph import fabric_graph, fabric_summary, node_graph
from exatwin.topology.machine import load_machine, machine_names


@pytest.fixture(scope="module")
def frontier():
    return load_machine("frontier")


@pytest.fixture(scope="module")
def frontier_fabric(frontier):
    return fabric_graph(frontier)


@pytest.mark.parametrize("name", machine_names())
def test_every_node_is_connected_and_every_edge_has_a_bandwidth(name):
    machine = load_machine(name)
    graph = node_graph(machine)
    kinds = Counter(kind for _, kind in graph.nodes(data="kind"))
    assert kinds["device"] == machine.devices_per_node
    assert kinds["nic"] == machine.node.nic_count
    assert kinds["switch"] == (machine.node.kind == "switched")
    assert nx.is_connected(graph)
    assert all(edge["bandwidth_bytes_per_s"] > 0 and edge["count"] > 0 for _, _, edge in graph.edges(data=True))


def test_a_frontier_node_has_26_links_and_reaches_any_gcd_in_two_hops(frontier):
    graph = node_graph(frontier)
    assert graph.edges[("device", 0), ("device", 1)] == {"count": 4, "bandwidth_bytes_per_s": 200e9}
    assert graph.edges[("nic", "hsn1"), ("device", 3)]["bandwidth_bytes_per_s"] == pytest.approx(25e9)
    devices = graph.subgraph(("device", number) for number in range(8))
    assert sum(count for _, _, count in devices.edges(data="count")) == 4 * 4 + 2 * 2 + 6
    assert nx.diameter(devices) == 2


def test_a_switched_node_reaches_any_gpu_in_two_hops():
    graph = node_graph(load_machine("dgx-h100"))
    assert nx.shortest_path_length(graph, ("device", 0), ("device", 7)) == 2
    assert graph.edges[("device", 0), ("switch",)]["bandwidth_bytes_per_s"] == pytest.approx(450e9)


def test_the_whole_of_frontier_is_drawn_in_two_seconds(frontier):
    start = time.process_time()
    fabric_graph(frontier)
    assert time.process_time() - start < 2


def test_each_of_frontiers_switches_reaches_the_31_others_of_its_group(frontier_fabric):
    inside = frontier_fabric.edge_subgraph(
        (a, b) for a, b, scope in frontier_fabric.edges(data="scope") if scope == "group"
    )
    assert frontier_fabric.number_of_nodes() == 77 * 32
    assert {degree for _, degree in inside.degree()} == {31}


def test_any_two_groups_of_frontier_share_four_links(frontier_fabric):
    pairs = Counter()
    for a, b, edge in frontier_fabric.edges(data=True):
        if edge["scope"] == "global":
            pairs[frozenset((a[0], b[0]))] += edge["count"]
    assert len(pairs) == 77 * 76 / 2
    assert set(pairs.values()) == {4}


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_no_slingshot_switch_has_more_than_its_64_ports(name):
    ports = Counter()
    graph = fabric_graph(load_machine(name))
    for a, b, count in graph.edges(data="count"):
        ports[a] += count
        ports[b] += count
    assert max(ports[switch] + graph.nodes[switch]["endpoints"] for switch in graph) <= 64


@pytest.mark.parametrize("name", ["frontier", "lumi-g"])
def test_global_links_are_spread_evenly_over_the_switches_of_a_group(name):
    fabric = load_machine(name).fabric
    groups, links = fabric.groups.value, fabric.links_per_group_pair.value
    for group in (0, groups // 2, groups - 1):
        held = Counter(fabric.gateway(group, peer, k) for peer in range(groups) if peer != group for k in range(links))
        assert max(held.values()) - min(held.values()) <= 1


def test_switches_of_a_dragonfly_are_three_hops_apart_at_most(frontier):
    graph = frontier.fabric.graph(groups=4)
    assert nx.diameter(graph) == 3


def test_frontiers_taper_is_the_published_one_at_its_first_size(frontier):
    fabric = frontier.fabric
    assert fabric.injection_bytes_per_s() * 8 == pytest.approx(102.4e12)
    assert fabric.global_bytes_per_s(groups=74) * 8 == pytest.approx(58.4e12)
    assert fabric.injection_bytes_per_s() / fabric.global_bytes_per_s(groups=74) == pytest.approx(1.753, abs=1e-3)
    assert fabric_summary(frontier)["taper"] == pytest.approx(1.684, abs=1e-3)


def test_lumis_links_add_up_to_the_published_bandwidth_between_its_groups():
    fabric = load_machine("lumi-g").fabric
    graph = fabric.graph()
    total = sum(edge["bandwidth_bytes_per_s"] for _, _, edge in graph.edges(data=True) if edge["scope"] == "global")
    assert 2 * total == pytest.approx(276e12)  # published both ways
    assert (fabric.group_of(0), fabric.group_of(2851), fabric.group_of(2852), fabric.group_of(2977)) == (0, 22, 23, 23)


def test_a_tofu_node_has_ten_ports():
    fabric = load_machine("fugaku").fabric
    assert fabric.shape == (24, 23, 24, 2, 3, 2)
    assert fabric.ports_per_node() == 10


def test_a_tofu_unit_is_twelve_nodes_with_a_ring_of_three():
    unit = load_machine("fugaku").fabric.graph((1, 1, 1, 2, 3, 2))
    assert unit.number_of_nodes() == 12
    assert {degree for _, degree in unit.degree()} == {4}
    assert Counter(axis for _, _, axis in unit.edges(data="axis")) == {"a": 6, "b": 12, "c": 6}


def test_a_torus_closes_its_rings_and_a_cut_axis_does_not():
    fabric = load_machine("fugaku").fabric
    ring = fabric.graph((24, 1, 1, 1, 1, 1))
    line = fabric.graph((12, 1, 1, 1, 1, 1))
    assert nx.diameter(ring) == 12
    assert ring.number_of_edges() == 24
    assert line.number_of_edges() == 11


@pytest.mark.slow
def test_the_whole_of_fugaku_has_ten_links_at_every_node():
    graph = fabric_graph(load_machine("fugaku"))
    assert graph.number_of_nodes() == 158_976
    assert {degree for _, degree in graph.degree()} == {10}


def test_a_rail_optimised_tree_joins_rails_only_at_the_core():
    machine = load_machine("dgx-h100")
    graph = fabric_graph(machine)
    leaves = [vertex for vertex in graph if vertex[0] == "leaf"]
    assert len(leaves) == 64 * 8
    assert nx.shortest_path_length(graph, ("leaf", 0, 0), ("leaf", 5, 0)) == 2
    assert nx.shortest_path_length(graph, ("leaf", 0, 0), ("leaf", 5, 1)) == 4
    uplinks = sum(edge["count"] for *_, edge in graph.edges(leaves, data=True))
    assert uplinks == 16_384  # cables from leaf to spine, as many as GPUs


@pytest.mark.parametrize("name", machine_names())
def test_every_fabric_sums_up_its_kind_and_its_link(name):
    machine = load_machine(name)
    summary = fabric_summary(machine)
    assert summary["kind"] in FABRICS
    assert summary["link_bytes_per_s"] == machine.fabric.link_bandwidth_bytes_per_s
    assert summary["injection_bytes_per_s_per_node"] == machine.node.injection_bytes_per_s


def test_a_part_that_is_not_there_cannot_be_drawn(frontier):
    with pytest.raises(InputError, match="1 to 77 can be drawn"):
        frontier.fabric.graph(groups=78)
    with pytest.raises(InputError, match="is no block of"):
        load_machine("fugaku").fabric.graph((25, 1, 1, 1, 1, 1))
    with pytest.raises(InputError, match="is no block of"):
        load_machine("fugaku").fabric.graph((2, 2))
    with pytest.raises(InputError, match="0 nodes make 0 leaves"):
        load_machine("selene").fabric.graph(0)


@pytest.mark.parametrize("name", machine_names())
def test_every_summary_tells_bisection_taper_and_diameter(name):
    machine = load_machine(name)
    summary = fabric_summary(machine)
    assert summary["bisection_bytes_per_s"] > 0
    assert summary["taper"] > 0
    assert summary["diameter_hops"] >= 1 or machine.node_count == 1
    assert all(isinstance(value, (int, float, str)) for value in summary.values())


def test_bisections_are_those_of_the_formulas():
    assert fabric_summary(load_machine("frontier"))["bisection_bytes_per_s"] == pytest.approx(38 * 39 * 100e9)
    assert fabric_summary(load_machine("lumi-g"))["bisection_bytes_per_s"] == pytest.approx(12 * 12 * 500e9)
    assert fabric_summary(load_machine("dgx-h100"))["bisection_bytes_per_s"] == pytest.approx(1024 * 8 * 50e9)
    fugaku = fabric_summary(load_machine("fugaku"))
    assert fugaku["bisection_bytes_per_s"] == pytest.approx(2 * 158_976 / 24 * 6.8e9)
    assert fugaku["diameter_hops"] == 12 + 11 + 12 + 1 + 1 + 1


def test_auroras_global_links_add_up_to_what_is_printed():
    fabric = load_machine("aurora").fabric
    both_ways = 2 * fabric.groups.value * fabric.global_bytes_per_s() / 2
    assert both_ways == pytest.approx(1.38e15, rel=0.01)


@pytest.mark.parametrize("name", ["frontier", "lumi-g", "aurora"])
def test_no_switch_has_more_nodes_than_ports_for_them(name):
    machine = load_machine(name)
    graph = fabric_graph(machine, with_nodes=True)
    ports = Counter()
    for a, b, count in graph.edges(data="count"):
        if a[0] == "node":
            ports[b] += count
        elif b[0] == "node":
            ports[a] += count
    assert max(ports.values()) <= 16
    assert sum(ports.values()) == machine.node_count * machine.node.nic_count


def test_a_tree_with_pods_joins_them_at_its_cores():
    from .small import fat_tree

    machine = fat_tree(16, 2, 3, leaves_per_pod=4, core_oversubscription=2)
    graph = fabric_graph(machine)
    assert nx.shortest_path_length(graph, ("leaf", 0, 0), ("leaf", 3, 0)) == 2
    assert nx.shortest_path_length(graph, ("leaf", 0, 0), ("leaf", 4, 0)) == 4
    assert graph.edges[("spine", 0, 0), ("core",)]["bandwidth_bytes_per_s"] == pytest.approx(4 * 2 * 10e9 / 2)
    summary = fabric_summary(machine)
    assert (summary["pods"], summary["taper"]) == (2, 2)
    with pytest.raises(InputError, match="is for three levels; there are 2"):
        fat_tree(16, 2, 2, leaves_per_pod=4)
