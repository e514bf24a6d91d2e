"""Fat tree: leaves that nodes plug into, spines above them, and cores above those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..errors import Problem, input_error
from ..facts import BandwidthFact, CountFact, Entry, Fact, RatioFact

if TYPE_CHECKING:
    import networkx as nx


class LevelsFact(Fact[Annotated[int, Field(strict=True, ge=1, le=3)]]):
    """Levels of switches."""


class FatTree(Entry):
    """A fat tree of one to three levels, plain or by rails.

    With rails, NIC i of each of a leaf's nodes is plugged into that leaf's rail i, and
    the spines of a three-level tree join the leaves of one rail; only cores join rails.

    Attributes:
        levels: Switches from the bottom to the top: leaf, spine, core.
        nodes_per_leaf: Nodes below one leaf of each rail.
        rails: Leaves that each node is plugged into.
        oversubscription: Bandwidth into a leaf from below, over that to the level above.
        link_bandwidth: One link, one direction.
    """

    kind: Literal["fat_tree"]
    levels: LevelsFact
    nodes_per_leaf: CountFact
    rails: CountFact
    oversubscription: RatioFact
    link_bandwidth: BandwidthFact

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """One link, one direction."""
        return self.link_bandwidth.value

    @property
    def uplink_bytes_per_s(self) -> float:
        """What one leaf can send upwards, one direction."""
        return self.nodes_per_leaf.value * self.link_bandwidth_bytes_per_s / self.oversubscription.value

    def group_of(self, node: int) -> int:
        """The set of leaves a node is plugged into, nodes counted leaf by leaf."""
        return node // self.nodes_per_leaf.value

    def summary(self) -> dict[str, float | int | str]:
        """The sizes and bandwidths that describe the fabric."""
        return {
            "kind": self.kind,
            "levels": self.levels.value,
            "rails": self.rails.value,
            "nodes_per_leaf": self.nodes_per_leaf.value,
            "oversubscription": self.oversubscription.value,
            "link_bytes_per_s": self.link_bandwidth_bytes_per_s,
            "uplink_bytes_per_s_per_leaf": self.uplink_bytes_per_s,
        }

    def problems(self, nodes: int, nics_per_node: int) -> list[Problem]:
        """What keeps so many nodes from being plugged in."""
        problems = []
        if nics_per_node % self.rails.value:
            message = f"{self.rails.value} rails do not share {nics_per_node} NICs a node evenly"
            problems.append(Problem("fabric.rails.value", message))
        if self.levels.value == 1 and nodes > self.nodes_per_leaf.value:
            message = f"one level holds {self.nodes_per_leaf.value} nodes, but there are {nodes}"
            problems.append(Problem("fabric.levels.value", message))
        return problems

    def graph(self, nodes: int) -> nx.Graph:
        """The switches above so many nodes, as `networkx` sees them.

        Spines that serve the same leaves are one vertex, since traffic spreads over
        them alike; the edge carries their links' sum.

        Returns:
            A graph whose vertices are ``("leaf", set, rail)``, ``("spine", plane)`` and ``("core",)``. An edge
            has ``count`` of links (a fraction where oversubscription does not divide) and
            ``bandwidth_bytes_per_s`` of them all, one direction.
        """
        import networkx as nx

        sets = -(-nodes // self.nodes_per_leaf.value)
        rails = self.rails.value
        if not 0 < sets * rails <= 10**6:
            raise input_error(f"{nodes} nodes make {sets * rails} leaves; 1 to 1000000 can be drawn")
        graph = nx.Graph(kind=self.kind)
        graph.add_nodes_from(("leaf", leaf, rail) for leaf in range(sets) for rail in range(rails))
        if self.levels.value == 1:
            return graph
        links = self.nodes_per_leaf.value / self.oversubscription.value
        for leaf in range(sets):
            for rail in range(rails):
                plane = rail if self.levels.value == 3 else 0
                self._join(graph, ("leaf", leaf, rail), ("spine", plane), links)
        if self.levels.value == 3:
            for rail in range(rails):
                self._join(graph, ("spine", rail), ("core",), links * sets)
        return graph

    def _join(self, graph: nx.Graph, below: tuple[object, ...], above: tuple[object, ...], links: float) -> None:
        graph.add_edge(below, above, count=links, bandwidth_bytes_per_s=links * self.link_bandwidth_bytes_per_s)
