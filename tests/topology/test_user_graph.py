"""A fabric of the user's own: read from a file, and searched."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exatwin.topology.errors import InputError
from exatwin.topology.faults import Fault
from exatwin.topology.graph import fabric_graph, fabric_summary, node_graph, read_graph, write_graph
from exatwin.topology.machine import load_machine
from exatwin.topology.placement import Placement, crossings
from exatwin.topology.routing import IN_FABRIC, Routes

from .small import dragonfly, fact, fat_tree, small, torus

# Two leaves of two nodes, joined by two spines; one spine has twice the links.
LEAVES = """# a small Clos network
node:0 leaf:0
node:1 leaf:0
node:2 leaf:1
node:3 leaf:1
leaf:0 spine:0
leaf:1 spine:0
leaf:0 spine:1 x2
leaf:1 spine:1 x2   # twice as wide
"""


def from_text(folder, text, nodes=4, suffix=".edges", **how):
    file = folder / f"net{suffix}"
    file.write_text(text, encoding="utf-8")
    fabric = {"kind": "graph", "file": str(file), "link_bandwidth": fact("10 GB/s")}
    return small(fabric, nodes, **how)


def from_graph(folder, graph, machine, suffix=".json"):
    file = folder / f"net{suffix}"
    write_graph(graph, file)
    fabric = {"kind": "graph", "file": file.name, "link_bandwidth": fact("10 GB/s")}
    nics = machine.node.nic_count
    return small(fabric, machine.node_count, machine.devices_per_node, nics, where=str(folder / "machine.yaml"))


def test_a_machine_file_names_its_graph_by_a_path_from_its_own_folder():
    machine = load_machine(str(Path(__file__).parent / "data" / "two-leaves.yaml"))
    assert machine.node_count == 4
    routes = Routes(machine, 4)
    hops = routes.route(np.array([1]), np.array([6]))
    assert "leaf:0 -> spine:1" in {routes.name(int(link)) for link in hops.link}
    with pytest.raises(InputError, match=r"fabric\.file"):
        small({"kind": "graph", "file": "a\0b.json", "link_bandwidth": fact("1 GB/s")}, 4)


def test_messages_share_the_shortest_ways_by_their_links(tmp_path):
    routes = Routes(from_text(tmp_path, LEAVES), 4)
    hops = routes.route(np.array([0]), np.array([3]))
    found = {routes.name(int(link)): share for link, share in zip(hops.link, hops.share, strict=True)}
    assert found == {
        "node 0 nic0 out": 1,
        "node 3 nic0 in": 1,
        "node:0 -> leaf:0": 1,
        "leaf:0 -> spine:0": pytest.approx(0.2),  # 1 x 1 of 1 x 1 + 2 x 2 ways
        "leaf:0 -> spine:1": pytest.approx(0.8),
        "spine:0 -> leaf:1": pytest.approx(0.2),
        "spine:1 -> leaf:1": pytest.approx(0.8),
        "leaf:1 -> node:3": 1,
    }
    assert routes.fabric_hops(np.array([0, 0, 0]), np.array([0, 1, 3])).tolist() == [0, 0, 2]


def test_its_summary_and_groups_are_told(tmp_path):
    machine = from_text(tmp_path, LEAVES)
    summary = fabric_summary(machine)
    assert summary["switches"] == 4
    assert summary["most_ports"] == 5
    assert summary["bisection_bytes_per_s"] == pytest.approx(20e9)  # two nodes of 10 GB/s, less than three links
    assert summary["taper"] == pytest.approx(1.0)
    assert summary["diameter_hops"] == 2
    assert crossings(Placement(1, 4, 1, 1), machine) == ["data-parallel groups span 4 nodes and 2 switches"]


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([".json", ".graphml", ".edges"]), st.integers(0, 3))
def test_a_known_fabric_written_out_is_searched_as_it_is_computed(tmp_path_factory, suffix, kind):
    folder = tmp_path_factory.mktemp("nets")
    machine = [
        dragonfly(1, 4, 2, 1),
        fat_tree(9, 3, 2),
        fat_tree(8, 2, 3, leaves_per_pod=2),
        torus((4, 3), (True,) * 2),
    ][kind]
    again = from_graph(folder, fabric_graph(machine, with_nodes=True), machine, suffix)
    count = machine.node_count
    pairs = np.array(list(itertools.permutations(range(count), 2)))
    own = tuple(range(count)) if kind == 3 else None
    asked = [Routes(one, count, own).fabric_hops(pairs[:, 0], pairs[:, 1]).tolist() for one in (machine, again)]
    assert asked[0] == asked[1]
    searched, computed = Routes(again, count), Routes(machine, count, own)
    if kind in (1, 3):
        # Every node sends to one other: the busiest link is as busy by both ways of telling.
        source = np.arange(count)
        target = np.roll(source, -4)
        loads = []
        for routes in (searched, computed):
            hops = routes.route(source, target)
            loads.append((np.bincount(hops.link, hops.share, len(routes.capacity)) / routes.capacity).max())
        assert loads[0] == pytest.approx(loads[1]) if kind == 1 else loads[0] <= loads[1] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.integers(0, 2**32 - 1))
def test_what_enters_a_vertex_leaves_it(tmp_path_factory, switches, seed):
    rng = np.random.default_rng(seed)
    graph = nx.random_labeled_tree(switches, seed=int(rng.integers(2**31)))
    for _ in range(switches):
        a, b = rng.integers(0, switches, 2)
        if a != b:
            graph.add_edge(int(a), int(b))
    named = nx.relabel_nodes(graph, {v: f"s{v}" for v in graph})
    for node in range(4):
        named.add_edge(f"node:{node}", f"s{rng.integers(0, switches)}", count=1)
    folder = tmp_path_factory.mktemp("random")
    write_graph(named, folder / "net.json")
    fabric = {"kind": "graph", "file": "net.json", "link_bandwidth": fact("10 GB/s")}
    routes = Routes(small(fabric, 4, where=str(folder / "m.yaml")), 4)
    source, target = np.array(list(itertools.permutations(range(4), 2))).T
    hops = routes.route(source, target)
    beyond = routes.place[hops.link] == IN_FABRIC
    for message in range(len(source)):
        mine = beyond & (hops.message == message)
        balance: dict[str, float] = {}
        for link, share in zip(hops.link[mine], hops.share[mine], strict=True):
            a, b = routes.name(int(link)).split(" -> ")
            balance[a] = balance.get(a, 0.0) - share
            balance[b] = balance.get(b, 0.0) + share
        assert balance.pop(f"node:{source[message]}") == pytest.approx(-1)
        assert balance.pop(f"node:{target[message]}") == pytest.approx(1)
        assert all(abs(rest) < 1e-9 for rest in balance.values())
        length = nx.shortest_path_length(named, f"node:{source[message]}", f"node:{target[message]}")
        assert hops.share[mine].sum() == pytest.approx(length)


def test_a_failed_edge_is_gone_around(tmp_path):
    machine = from_text(tmp_path, LEAVES)
    routes = Routes(machine, 4, faults=(Fault("fabric", 0.0, ends=("leaf:0", "spine:1")),))
    hops = routes.route(np.array([0]), np.array([3]))
    assert "leaf:0 -> spine:0" in {routes.name(int(link)) for link in hops.link}
    assert set(hops.share.tolist()) == {1.0}
    cut = Routes(machine, 4, faults=(Fault("fabric", 0.0, ends=(0, "leaf:0")),))
    with pytest.raises(InputError, match="no way leads from node:0 to node:3"):
        cut.route(np.array([0]), np.array([3]))
    half = Routes(machine, 4, faults=(Fault("fabric", 0.5, ends=("leaf:0", "spine:1")),))
    assert (half.capacity < routes.capacity.max()).any()
    with pytest.raises(InputError, match="the graph has no vertex leaf:9; did you mean leaf:"):
        _ = Routes(machine, 4, faults=(Fault("fabric", 0.5, ends=("leaf:9", "spine:1")),)).capacity
    with pytest.raises(InputError, match="leaf:0 is joined to node:0"):
        _ = Routes(machine, 4, faults=(Fault("fabric", 0.5, ends=("leaf:0", "leaf:1")),)).capacity


@pytest.mark.parametrize(
    ("suffix", "text", "said"),
    [
        (".edges", "node:0 a\nnode:1 b\nnode:2 a\nnode:3 a\n", "disconnected: no way leads from node:0 to b, node:1"),
        (".edges", "node:0 a\nnode:1 a\n", "it lacks node:2, node:3"),
        (".edges", LEAVES + "node:4 leaf:0\n", "it has node:4 too many"),
        (".edges", "node:0\n", "line 1: one vertex is no edge"),
        (".edges", "node:0 a xmany\n", "line 1: xmany is no count of links"),
        (".edges", "node:0 a x0\n", "edge node:0 - a has the count 0.0"),
        (".edges", "node:0 a 10\n", "edge node:0 - a: bandwidth '10' has no unit"),
        (".edges", "a a\n", "joins a to itself"),
        (".edges", " \n", "is empty"),
        (".json", "{", "is not valid JSON: line 1"),
        (".json", "[]", "needs the lists 'nodes' and 'links'"),
        (".json", '{"nodes": [{}], "links": []}', "has a node without an id"),
        (".json", '{"nodes": [{"id": "a"}], "links": [{"source": "a", "target": "b"}]}', "a link to b, which is none"),
        (".json", '{"nodes": [{"id": "a"}], "links": [{"source": "a"}]}', "a link without source and target"),
        (".graphml", "<graphml", "is not valid GraphML"),
        (".txt", "", "a graph file ends in .graphml, .json, .edges, not '.txt'"),
    ],
)
def test_a_broken_file_is_said_with_its_place(tmp_path, suffix, text, said):
    with pytest.raises(InputError) as caught:
        from_text(tmp_path, text, suffix=suffix)
    assert said in str(caught.value)
    assert "fabric.file" in str(caught.value)


def test_a_missing_file_is_an_error_of_the_machine(tmp_path):
    fabric = {"kind": "graph", "file": "none.json", "link_bandwidth": fact("10 GB/s")}
    with pytest.raises(InputError, match=r"fabric.file: .*none.json: no such file"):
        small(fabric, 4, where=str(tmp_path / "machine.yaml"))


@pytest.mark.parametrize("suffix", [".graphml", ".json", ".edges"])
def test_a_graph_comes_back_from_its_file(tmp_path, suffix):
    graph = node_graph(load_machine("frontier"))
    write_graph(graph, tmp_path / f"node{suffix}")
    again = read_graph(tmp_path / f"node{suffix}")
    assert set(again) == {":".join(map(str, vertex)) for vertex in graph}
    assert again.number_of_edges() == graph.number_of_edges()
    assert again.edges["device:0", "device:1"]["count"] == 4
    assert again.edges["device:0", "device:1"]["bandwidth_bytes_per_s"] == pytest.approx(200e9)
    with pytest.raises(InputError, match="cannot be written"):
        write_graph(graph, tmp_path / "none" / f"node{suffix}")


def test_parallel_edges_of_another_tools_file_are_one_edge(tmp_path):
    document = {
        "directed": True,
        "nodes": [{"id": 1}, {"id": 2}],
        "edges": [
            {"source": 1, "target": 2, "bandwidth": "100 Gb/s"},
            {"source": 2, "target": 1, "bandwidth": "1 GB/s"},
        ],
    }
    file = tmp_path / "net.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    edge = read_graph(file).edges["1", "2"]
    assert edge["count"] == 2
    assert edge["bandwidth_bytes_per_s"] == pytest.approx(13.5e9)
