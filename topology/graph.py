"""Machines as graphs, to look at and to check; `networkx` is loaded when one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fabrics import Dragonfly, FatTree
from .machine import Machine

if TYPE_CHECKING:
    import networkx as nx


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


def fabric_graph(machine: Machine) -> nx.Graph:
    """The whole fabric; its own ``graph`` method draws a part of it."""
    fabric = machine.fabric
    if isinstance(fabric, FatTree):
        return fabric.graph(machine.node_count)
    return fabric.graph()


def fabric_summary(machine: Machine) -> dict[str, float | int | str]:
    """The sizes and bandwidths that describe the fabric, with those of a node's ports."""
    summary = machine.fabric.summary()
    summary["nics_per_node"] = machine.node.nic_count
    summary["injection_bytes_per_s_per_node"] = machine.node.injection_bytes_per_s
    if isinstance(machine.fabric, Dragonfly):
        # With all traffic leaving the group; the groups of a real machine may hold fewer nodes than ports.
        outgoing = machine.fabric.global_bytes_per_s() / machine.fabric.group_nodes.value
        summary["global_bytes_per_s_per_node"] = outgoing
    return summary
