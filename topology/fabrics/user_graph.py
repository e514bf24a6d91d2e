"""A fabric of the user's own: any graph of switches and nodes, read from a file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..errors import Problem
from ..facts import BandwidthFact, Entry
from ..graph_files import read_graph

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    import numpy.typing as npt

NODE = "node:"


class UserGraph(Entry):
    """A graph whose vertices ``node:0``, ``node:1``, ... are the machine's nodes, and all others switches.

    Messages take the shortest ways, and spread evenly over those that are as short.
    An edge may state a ``count`` of links and a bandwidth. In a machine file::

        fabric:
          kind: graph
          file: two-leaves.edges
          link_bandwidth: {value: 10 GB/s, source: my-site}

    and in two-leaves.edges beside it, a line an edge::

        node:0 leaf:0
        leaf:0 spine:0 x2 25GB/s    # two links of 25 GB/s

    Attributes:
        file: Beside the machine file: GraphML (``.graphml``), node-link JSON (``.json``) or a list of
            edges (``.edges``).
        link_bandwidth: One link, one direction, of an edge that states no bandwidth.
    """

    kind: Literal["graph"]
    file: str = Field(min_length=1, max_length=4000)
    link_bandwidth: BandwidthFact

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """One link, one direction, of an edge that states no bandwidth."""
        return self.link_bandwidth.value

    @cached_property
    def _graph(self) -> nx.Graph:
        graph = read_graph(Path(self.file))
        for _, _, edge in graph.edges(data=True):
            edge.setdefault("bandwidth_bytes_per_s", edge["count"] * self.link_bandwidth_bytes_per_s)
        return graph

    def graph(self, nodes: int | None = None) -> nx.Graph:
        """The graph, each edge with its ``count`` and the ``bandwidth_bytes_per_s`` of all its links."""
        del nodes  # the file says which there are
        return self._graph.copy()

    @cached_property
    def first_switch(self) -> tuple[str, ...]:
        """The switch that each node hangs on, the first in the file where there are several."""
        graph = self._graph
        count = sum(vertex.startswith(NODE) for vertex in graph)
        return tuple(
            next((v for v in graph.neighbors(f"{NODE}{node}") if not v.startswith(NODE)), f"{NODE}{node}")
            for node in range(count)
        )

    def groups_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The switch that each node hangs on, numbered in the order of the nodes."""
        import numpy as np

        number: dict[str, int] = {}
        for switch in self.first_switch:
            number.setdefault(switch, len(number))
        return np.array([number[switch] for switch in self.first_switch], dtype=np.int64)[nodes]

    def summary(self) -> dict[str, float | int | str]:
        """The sizes and bandwidths that describe the fabric."""
        import networkx as nx

        graph = self._graph
        nodes = [vertex for vertex in graph if vertex.startswith(NODE)]
        switches = [vertex for vertex in graph if not vertex.startswith(NODE)]
        ports = sorted(sum(edge["count"] for *_, edge in graph.edges(v, data=True)) for v in switches or nodes)
        lengths = dict(nx.all_pairs_shortest_path_length(graph)) if len(graph) <= 2000 else {}
        hops = [lengths[a][b] for a in nodes for b in nodes] if lengths else []
        inner = 2 if switches else 0  # the cables of the two nodes are no hop between switches
        summary: dict[str, float | int | str] = {
            "kind": self.kind,
            "nodes": len(nodes),
            "switches": len(switches),
            "edges": graph.number_of_edges(),
            "least_ports": ports[0],
            "most_ports": ports[-1],
            "link_bytes_per_s": self.link_bandwidth_bytes_per_s,
            "bisection_bytes_per_s": self._halves_bytes_per_s(len(nodes)),
        }
        if hops:
            summary["diameter_hops"] = max(max(hops) - inner, 0)
        return summary

    def _halves_bytes_per_s(self, nodes: int) -> float:
        """What the lower-numbered half of the nodes can send to the others at most, one direction.

        The true bisection, the worst of all cuts in halves, is beyond reach for a graph at large.
        """
        import networkx as nx

        if nodes < 2:
            return 0.0
        graph = nx.Graph()
        graph.add_weighted_edges_from(
            ((a, b, edge["bandwidth_bytes_per_s"]) for a, b, edge in self._graph.edges(data=True)), weight="capacity"
        )
        for node in range(nodes):
            graph.add_edge("lower half" if node < nodes // 2 else "upper half", f"{NODE}{node}")
        return float(nx.maximum_flow_value(graph, "lower half", "upper half"))

    def problems(self, nodes: int, nics_per_node: int) -> list[Problem]:
        """What is wrong with the file, or with so many nodes on its graph."""
        del nics_per_node  # a node's edges are cables of the fabric, whatever its ports
        import networkx as nx

        try:
            graph = self._graph
        except (ValueError, OSError, RuntimeError) as error:  # among them a name no file system takes
            return [Problem("fabric.file", str(error)[:500])]
        asked = {f"{NODE}{node}" for node in range(nodes)}
        given = {vertex for vertex in graph if vertex.startswith(NODE)}
        if given != asked:
            missing, odd = sorted(asked - given, key=_by_number), sorted(given - asked, key=_by_number)
            parts = [f"it lacks {', '.join(missing[:5])}"] if missing else []
            parts += [f"it has {', '.join(odd[:5])} too many"] if odd else []
            message = (
                f"{self.file}: {nodes} nodes are the vertices node:0 to node:{nodes - 1}, but {' and '.join(parts)}"
            )
            return [Problem("fabric.file", message)]
        if not nx.is_connected(graph):
            reached = nx.node_connected_component(graph, f"{NODE}0")
            apart = sorted((vertex for vertex in graph if vertex not in reached), key=_by_number)
            shown = ", ".join(apart[:5]) + (f" and {len(apart) - 5} more" if len(apart) > 5 else "")
            return [
                Problem("fabric.file", f"{self.file}: the graph is disconnected: no way leads from node:0 to {shown}")
            ]
        return []


def _by_number(vertex: str) -> tuple[str, int, str]:
    kind, _, number = vertex.partition(":")
    return (kind, int(number), "") if number.isdecimal() else (kind, -1, number)
