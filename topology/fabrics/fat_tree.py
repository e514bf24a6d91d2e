"""Fat tree: leaves that nodes plug into, spines above them, and cores above those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..errors import Problem, input_error
from ..facts import BandwidthFact, CountFact, Entry, Fact, RatioFact

if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    import numpy.typing as npt


class LevelsFact(Fact[Annotated[int, Field(strict=True, ge=1, le=3)]]):
    """Levels of switches."""


class FatTree(Entry):
    """A fat tree of one to three levels, plain or by rails.

    With rails, NIC i of each of a leaf's nodes is plugged into that leaf's rail i, and
    the spines of a three-level tree join the leaves of one rail; only cores join rails.
    Spines reach all leaves, or those of a pod where the tree has pods; cores join pods.

    Attributes:
        levels: Switches from the bottom to the top: leaf, spine, core.
        nodes_per_leaf: Nodes below one leaf of each rail.
        rails: Leaves that each node is plugged into.
        oversubscription: Bandwidth into a leaf from below, over that to the level above.
        link_bandwidth: One link, one direction.
        leaves_per_pod: Sets of leaves that the same spines join; all of them where not said. Three levels only.
        core_oversubscription: Bandwidth into a pod's spines from its leaves, over that to the cores; 1 where not said.
    """

    kind: Literal["fat_tree"]
    levels: LevelsFact
    nodes_per_leaf: CountFact
    rails: CountFact
    oversubscription: RatioFact
    link_bandwidth: BandwidthFact
    leaves_per_pod: CountFact | None = None
    core_oversubscription: RatioFact | None = None

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

    def groups_of(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sets of leaves that nodes are plugged into."""
        return nodes // self.nodes_per_leaf.value

    def sets(self, nodes: int) -> int:
        """Sets of leaves below so many nodes; a set has one leaf a rail."""
        return -(-nodes // self.nodes_per_leaf.value)

    def pod_sets(self, nodes: int) -> int:
        """Sets of leaves in one pod."""
        return min(self.leaves_per_pod.value, self.sets(nodes)) if self.leaves_per_pod else self.sets(nodes)

    @property
    def planes(self) -> int:
        """Sets of spines that do not see each other: one a rail on three levels, else one."""
        return self.rails.value if self.levels.value == 3 else 1

    def leaf_bytes_per_s(self, nics_per_node: int) -> float:
        """What one leaf can send upwards, one direction, with so many ports a node."""
        return self.uplink_bytes_per_s * nics_per_node / self.rails.value

    def spine_bytes_per_s(self, nodes: int, nics_per_node: int) -> float:
        """What the spines of one plane of a pod can send to the cores, one direction."""
        below = self.pod_sets(nodes) * self.rails.value / self.planes * self.leaf_bytes_per_s(nics_per_node)
        return below / (self.core_oversubscription.value if self.core_oversubscription else 1.0)

    def size_summary(self, nodes: int, nics_per_node: int) -> dict[str, float | int | str]:
        """What follows from the number of nodes."""
        sets, levels = self.sets(nodes), self.levels.value
        pods = -(-sets // self.pod_sets(nodes)) if levels == 3 else 1
        injection = nodes * nics_per_node * self.link_bandwidth_bytes_per_s
        up = self.leaf_bytes_per_s(nics_per_node) * self.rails.value
        half = injection / 2 if sets == 1 else (sets // 2) * up
        if levels == 3 and pods > 1:
            half = min(half, (pods // 2) * self.planes * self.spine_bytes_per_s(nodes, nics_per_node))
        taper = self.oversubscription.value
        if self.core_oversubscription:
            taper *= self.core_oversubscription.value
        return {
            "leaf_sets": sets,
            "leaves": sets * self.rails.value,
            "pods": pods,
            "nics_per_leaf": self.nodes_per_leaf.value * nics_per_node // self.rails.value,
            "bisection_bytes_per_s": half,
            "taper": 1.0 if levels == 1 else taper,
            "diameter_hops": 0 if levels == 1 else 4 if levels == 3 and (pods > 1 or self.rails.value > 1) else 2,
        }

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
        problems += [
            Problem(f"fabric.{field}", f"is for three levels; there are {self.levels.value}")
            for field in ("leaves_per_pod", "core_oversubscription")
            if getattr(self, field) is not None and self.levels.value < 3
        ]
        if self.levels.value == 1 and nodes > self.nodes_per_leaf.value:
            message = f"one level holds {self.nodes_per_leaf.value} nodes, but there are {nodes}"
            problems.append(Problem("fabric.levels.value", message))
        return problems

    def graph(self, nodes: int, nics_per_node: int | None = None) -> nx.Graph:
        """The switches above so many nodes, as `networkx` sees them.

        Spines that serve the same leaves are one vertex, since traffic spreads over
        them alike; the edge carries their links' sum.

        Returns:
            A graph whose vertices are ``("leaf", set, rail)``, ``("spine", pod, plane)`` and ``("core",)``. An edge
            has ``count`` of links (a fraction where oversubscription does not divide) and
            ``bandwidth_bytes_per_s`` of them all, one direction.
        """
        import networkx as nx

        nics_per_node = self.rails.value if nics_per_node is None else nics_per_node
        sets = -(-nodes // self.nodes_per_leaf.value)
        rails = self.rails.value
        if not 0 < sets * rails <= 10**6:
            raise input_error(f"{nodes} nodes make {sets * rails} leaves; 1 to 1000000 can be drawn")
        graph = nx.Graph(kind=self.kind)
        graph.add_nodes_from(("leaf", leaf, rail) for leaf in range(sets) for rail in range(rails))
        if self.levels.value == 1:
            return graph
        links = self.nodes_per_leaf.value * nics_per_node / rails / self.oversubscription.value
        pod_sets = self.pod_sets(nodes)
        for leaf in range(sets):
            for rail in range(rails):
                plane = rail if self.levels.value == 3 else 0
                pod = leaf // pod_sets if self.levels.value == 3 else 0
                self._join(graph, ("leaf", leaf, rail), ("spine", pod, plane), links)
        if self.levels.value == 3:
            above = self.spine_bytes_per_s(nodes, nics_per_node) / self.link_bandwidth_bytes_per_s
            for pod in range(-(-sets // pod_sets)):
                for plane in range(self.planes):
                    self._join(graph, ("spine", pod, plane), ("core",), above)
        return graph

    def _join(self, graph: nx.Graph, below: tuple[object, ...], above: tuple[object, ...], links: float) -> None:
        graph.add_edge(below, above, count=links, bandwidth_bytes_per_s=links * self.link_bandwidth_bytes_per_s)
