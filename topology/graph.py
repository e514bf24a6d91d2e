"""Machines as graphs, to look at and to check; `networkx` is loaded when one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .fabrics import Dragonfly, FatTree, Torus, UserGraph
from .graph_files import read_graph, write_graph
from .machine import Machine

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["fabric_graph", "fabric_summary", "node_graph", "read_graph", "write_graph"]


def node_graph(machine: Machine) -> nx.Graph:
    """One node: its devices, its NICs, its switch where it has one, and what joins them.

    Returns:
        A graph whose vertices are ``("device", number)``, ``("nic", name)`` and ``("switch",)``, each with its
        ``kind``. An edge has ``count`` of links and ``bandwidth_bytes_per_s`` of them all, one direction.

    >>> from exatwin.topology.machine import load_machine
    >>> node_graph(load_machine("frontier")).edges[("device", 0), ("device", 1)]
    {'count': 4, 'bandwidth_bytes_per_s': 200000000000.0}
    """
    import networkx as nx

    node = machine.node
    graph = nx.Graph(machine=machine.name)
    graph.add_nodes_from((("device", number) for number in range(machine.devices_per_node)), kind="device")
    for link in node.links:
        a, b = link.between
        bandwidth = node.pair_bytes_per_s(a, b)
        graph.add_edge(("device", a), ("device", b), count=link.count, bandwidth_bytes_per_s=bandwidth)
    if node.switch_bandwidth:
        graph.add_node(("switch",), kind="switch")
        for number in range(machine.devices_per_node):
            bandwidth = node.switch_bandwidth.value
            graph.add_edge(("device", number), ("switch",), count=1, bandwidth_bytes_per_s=bandwidth)
    for nic in node.nics:
        graph.add_node(("nic", nic.name), kind="nic")
        bandwidth = node.nic_bandwidth_bytes_per_s
        graph.add_edge(("nic", nic.name), ("device", nic.device), count=1, bandwidth_bytes_per_s=bandwidth)
    return graph


def fabric_graph(machine: Machine, *, with_nodes: bool = False) -> nx.Graph:
    """The whole fabric; its own ``graph`` method draws a part of it.

    Args:
        machine: The machine.
        with_nodes: Whether the nodes stand in it too, as ``("node", number)``, joined to their switches by
            as many links as they have ports there. Then the graph, written to a file, is a fabric of
            kind ``graph``. The nodes of a torus are its vertices, and get these names.

    Returns:
        A graph whose edges have ``count`` of links and ``bandwidth_bytes_per_s`` of them all, one direction.
    """
    fabric, nics = machine.fabric, machine.node.nic_count
    graph = fabric.graph(machine.node_count, nics) if isinstance(fabric, FatTree) else fabric.graph()
    if not with_nodes or isinstance(fabric, UserGraph):
        return graph
    import networkx as nx
    import numpy as np

    nodes = np.arange(machine.node_count, dtype=np.int64)
    if isinstance(fabric, Torus):
        number = fabric.node_numbers(np.array(list(graph), dtype=np.int64)).tolist()
        return nx.relabel_nodes(graph, {vertex: ("node", n) for vertex, n in zip(graph, number, strict=True)})
    graph.add_nodes_from((("node", node) for node in nodes.tolist()), kind="node")
    group = fabric.groups_of(nodes).tolist()
    for nic in range(nics):
        if isinstance(fabric, Dragonfly):
            at = fabric.switches_of(nodes, np.full(len(nodes), nic), nics).tolist()
            ends: list[tuple[Any, ...]] = list(zip(group, at, strict=True))
        else:
            rail = nic * fabric.rails.value // nics
            ends = [("leaf", leaf, rail) for leaf in group]
        for node, end in enumerate(ends):
            edge = graph.get_edge_data(("node", node), end, {"count": 0, "bandwidth_bytes_per_s": 0.0})
            bandwidth = edge["bandwidth_bytes_per_s"] + machine.node.nic_bandwidth_bytes_per_s
            graph.add_edge(("node", node), end, count=edge["count"] + 1, bandwidth_bytes_per_s=bandwidth)
    return graph


def fabric_summary(machine: Machine) -> dict[str, float | int | str]:
    """The sizes and bandwidths that describe the fabric, with those of a node's ports.

    For every kind: counts, ports (degrees), ``bisection_bytes_per_s`` (one half of the machine to the
    other, one direction), ``taper`` (what is sent in over what gets across: out of a group for a dragonfly,
    into a leaf for a fat tree, over the bisection for others) and ``diameter_hops`` (most hops between switches,
    or between nodes where these pass messages on).
    """
    fabric, node = machine.fabric, machine.node
    summary = fabric.summary()
    summary["nics_per_node"] = node.nic_count
    summary["injection_bytes_per_s_per_node"] = node.injection_bytes_per_s
    if isinstance(fabric, Dragonfly):
        # With all traffic leaving the group; the groups of a real machine may hold fewer nodes than ports.
        outgoing = fabric.global_bytes_per_s() / fabric.group_nodes.value
        summary["global_bytes_per_s_per_node"] = outgoing
    elif isinstance(fabric, FatTree):
        summary |= fabric.size_summary(machine.node_count, node.nic_count)
    else:
        half = machine.node_count // 2 * node.injection_bytes_per_s
        across = float(summary["bisection_bytes_per_s"])
        summary["taper"] = half / across if across else 0.0
    return summary
