"""Dragonfly: switches joined all to all in groups, and groups joined all to all."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Literal

from ..errors import Problem, input_error
from ..facts import BandwidthFact, CountFact, Entry

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    import numpy.typing as npt


class Dragonfly(Entry):
    """A dragonfly with one link between any two switches of a group, such as Slingshot's.

    Attributes:
        groups: Groups of switches.
        group_nodes: Nodes of each group; the last group takes those that are left over.
        switches_per_group: Switches of a group, joined all to all.
        endpoints_per_switch: Switch ports that a NIC can be plugged into.
        links_per_group_pair: Links between any two groups.
        link_bandwidth: One link, one direction.
        switches_per_node: Switches that the ports of a node are shared among; 1 where not said.
    """

    kind: Literal["dragonfly"]
    groups: CountFact
    group_nodes: CountFact
    switches_per_group: CountFact
    endpoints_per_switch: CountFact
    links_per_group_pair: CountFact
    link_bandwidth: BandwidthFact
    switches_per_node: CountFact | None = None

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """One switch-to-switch link, one direction."""
        return self.link_bandwidth.value

    @property
    def in_group_ports(self) -> int:
        """Ports of a switch that lead to the other switches of its group."""
        return self.switches_per_group.value - 1

    def group_of(self, node: int) -> int:
        """The group a node stands in, nodes counted group by group."""
        return min(node // self.group_nodes.value, self.groups.value - 1)

    def groups_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The groups that nodes stand in."""
        groups: npt.NDArray[np.int64] = (nodes // self.group_nodes.value).clip(max=self.groups.value - 1)
        return groups

    def switches_of(
        self, nodes: npt.NDArray[np.int64], nics: npt.NDArray[np.int64], nics_per_node: int
    ) -> npt.NDArray[np.int64]:
        """The switch, within its group, that a node's port is plugged into.

        Ports fill the switches in turn. Where a node's ports are shared among several switches,
        as many switches are filled side by side.
        """
        place = nodes - self.groups_of(nodes) * self.group_nodes.value
        beside = self.switches_per_node.value if self.switches_per_node else 1
        ports = nics_per_node // beside  # of a node, on each of its switches
        block = place // max(self.endpoints_per_switch.value // max(ports, 1), 1)
        switch: npt.NDArray[np.int64] = block * beside + (nics // max(ports, 1)).clip(max=beside - 1)
        return switch % self.switches_per_group.value

    def gateway(self, group: int, peer: int, link: int) -> int:
        """The switch of a group that holds one of its links to another group.

        Sites do not publish this wiring; ours deals a group's global links to its
        switches in turn, so that no switch holds more than one link above another.
        """
        rank = peer if peer < group else peer - 1
        return (rank * self.links_per_group_pair.value + link) % self.switches_per_group.value

    def injection_bytes_per_s(self) -> float:
        """What the endpoints of a full group can send at once."""
        return self.switches_per_group.value * self.endpoints_per_switch.value * self.link_bandwidth_bytes_per_s

    def global_bytes_per_s(self, groups: int | None = None) -> float:
        """What can leave a group at once, one direction, on a machine of so many groups."""
        peers = (groups or self.groups.value) - 1
        return peers * self.links_per_group_pair.value * self.link_bandwidth_bytes_per_s

    def pair_bytes_per_s(self) -> float:
        """What one group can send to one other over the links between them, one direction."""
        return self.links_per_group_pair.value * self.link_bandwidth_bytes_per_s

    def local_bytes_per_s(self) -> float:
        """All links between the switches of a group, one direction each way."""
        switches = self.switches_per_group.value
        return switches * (switches - 1) * self.link_bandwidth_bytes_per_s

    def summary(self) -> dict[str, float | int | str]:
        """The sizes and bandwidths that describe the fabric."""
        groups, switches = self.groups.value, self.switches_per_group.value
        injection, outgoing = self.injection_bytes_per_s(), self.global_bytes_per_s()
        held = (groups - 1) * self.links_per_group_pair.value
        return {
            "kind": self.kind,
            "groups": groups,
            "nodes_per_group": self.group_nodes.value,
            "switches": groups * switches,
            "endpoint_ports_per_switch": self.endpoints_per_switch.value,
            "in_group_ports_per_switch": self.in_group_ports,
            "global_ports_per_switch": -(-held // switches),
            "ports_per_switch": self.endpoints_per_switch.value + self.in_group_ports - (-held // switches),
            "links_per_group_pair": self.links_per_group_pair.value,
            "link_bytes_per_s": self.link_bandwidth_bytes_per_s,
            "injection_bytes_per_s_per_group": injection,
            "global_bytes_per_s_per_group": outgoing,
            "group_pair_bytes_per_s": self.pair_bytes_per_s() if groups > 1 else 0.0,
            "bisection_bytes_per_s": (groups // 2) * (groups - groups // 2) * self.pair_bytes_per_s(),
            "taper": injection / outgoing if outgoing else 0.0,
            "diameter_hops": min(switches - 1, 1) if groups == 1 else 1 + 2 * min(switches - 1, 1),
        }

    def problems(self, nodes: int, nics_per_node: int) -> list[Problem]:
        """What keeps so many nodes from being plugged in."""
        problems = []
        per_group = self.group_nodes.value
        last_group = nodes - per_group * (self.groups.value - 1)
        ports = self.switches_per_group.value * self.endpoints_per_switch.value
        if last_group <= 0:
            fewest = -(-nodes // per_group)
            message = (
                f"{nodes} nodes in groups of {per_group} leave some of {self.groups.value} groups empty; use {fewest}"
            )
            problems.append(Problem("fabric.groups.value", message))
        beside = self.switches_per_node.value if self.switches_per_node else 1
        if nics_per_node % beside:
            message = f"{beside} switches do not share the {nics_per_node} NICs of a node evenly"
            problems.append(Problem("fabric.switches_per_node.value", message))
        most = max(per_group, last_group)
        if most * nics_per_node > ports:
            message = (
                f"a group of {most} nodes with {nics_per_node} NICs each needs {most * nics_per_node} ports, "
                f"but its {self.switches_per_group.value} switches have {ports}"
            )
            problems.append(Problem("fabric.group_nodes.value", message))
        return problems

    def graph(self, groups: int | None = None) -> nx.Graph:
        """Switches and the links between them, as `networkx` sees them.

        Args:
            groups: How many groups to build; all of them where not said.

        Returns:
            A graph whose vertices are ``(group, switch)``. An edge has ``scope`` (``group`` or
            ``global``), ``count`` of links and ``bandwidth_bytes_per_s`` of them all, one direction.
        """
        import networkx as nx

        groups = self.groups.value if groups is None else groups
        if not 0 < groups <= self.groups.value:
            raise input_error(f"there are {self.groups.value} groups, so 1 to {self.groups.value} can be drawn")
        switches = range(self.switches_per_group.value)
        one_link = {"count": 1, "bandwidth_bytes_per_s": self.link_bandwidth_bytes_per_s}
        graph = nx.Graph(kind=self.kind)
        for group in range(groups):
            graph.add_nodes_from(((group, switch) for switch in switches), endpoints=self.endpoints_per_switch.value)
            pairs = combinations(switches, 2)
            graph.add_edges_from((((group, a), (group, b)) for a, b in pairs), scope="group", **one_link)
        for a, b in combinations(range(groups), 2):
            for link in range(self.links_per_group_pair.value):
                ends = (a, self.gateway(a, b, link)), (b, self.gateway(b, a, link))
                if graph.has_edge(*ends):
                    edge = graph.edges[ends]
                    edge["count"] += 1
                    edge["bandwidth_bytes_per_s"] += self.link_bandwidth_bytes_per_s
                else:
                    graph.add_edge(*ends, scope="global", **one_link)
        return graph
