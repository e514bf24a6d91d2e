"""Ways through a graph of the user's own: found by search, spread over all that are as short."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..errors import input_error, nearest
from ..fabrics import UserGraph
from ..fabrics.user_graph import NODE
from ..faults import Fault
from ..hops import Floats, Hops, Ints, Lanes, join
from .ways import Ways, no_such_link


class SearchedWays(Ways):
    """Links: each edge of the graph one way and back.

    A message spreads evenly over the shortest ways; an edge of several links counts as as many ways.
    """

    def bandwidths(self) -> Floats:
        """Bytes/s of each edge, both ways."""
        fabric = self.machine.fabric
        assert isinstance(fabric, UserGraph)
        graph = fabric.graph()
        self.vertices = list(graph)
        number = {vertex: index for index, vertex in enumerate(self.vertices)}
        self.links: dict[tuple[int, int], int] = {}
        bandwidth: list[float] = []
        self._count: list[float] = []
        for a, b, edge in graph.edges(data=True):
            for ends in ((number[a], number[b]), (number[b], number[a])):
                self.links[ends] = len(bandwidth)
                bandwidth.append(float(edge["bandwidth_bytes_per_s"]))
                self._count.append(float(edge["count"]))
        self.ends = list(self.links)
        self.node_at = [number[f"{NODE}{node}"] for node in self.node_ids.tolist()]
        self.hangs = [not fabric.first_switch[node].startswith(NODE) for node in self.node_ids.tolist()]
        self._trees: dict[int, tuple[list[int], list[float]]] = {}
        self._found: dict[tuple[int, int], tuple[Ints, Floats]] = {}
        return np.array(bandwidth)

    @cached_property
    def _beside(self) -> list[list[tuple[int, int]]]:
        """For each vertex its neighbours over links that work, and those links."""
        beside: list[list[tuple[int, int]]] = [[] for _ in self.vertices]
        for (a, b), link in self.links.items():
            if link not in self.failed:
                beside[a].append((b, link))
        return beside

    def _tree(self, start: int) -> tuple[list[int], list[float]]:
        """Distance of each vertex from one, and how many shortest ways lead there; -1 where none does."""
        if start not in self._trees:
            distance = [-1] * len(self.vertices)
            ways = [0.0] * len(self.vertices)
            distance[start], ways[start] = 0, 1.0
            edge_of_reach = [start]
            while edge_of_reach:
                fresh = []
                for here in edge_of_reach:
                    for there, link in self._beside[here]:
                        if distance[there] < 0:
                            distance[there] = distance[here] + 1
                            fresh.append(there)
                        if distance[there] == distance[here] + 1:
                            ways[there] += ways[here] * self._count[link]
                edge_of_reach = fresh
            self._trees[start] = distance, ways
        return self._trees[start]

    def _pair(self, source: int, target: int) -> tuple[Ints, Floats]:
        """Links between two nodes of the job, and the share of each."""
        if (source, target) not in self._found:
            start, goal = self.node_at[source], self.node_at[target]
            distance, ways = self._tree(start)
            if distance[goal] < 0:
                ends = self.vertices[start], self.vertices[goal]
                raise input_error(f"no way leads from {ends[0]} to {ends[1]}", field="perturb" if self.failed else "")
            share: dict[int, float] = {}
            through = {goal: 1.0}
            for step in range(distance[goal], 0, -1):
                before: dict[int, float] = {}
                for here, part in through.items():
                    for there, back in self._beside[here]:
                        link = back ^ 1  # the two ways of an edge are numbered side by side
                        if distance[there] == step - 1 and link not in self.failed:
                            taken = part * ways[there] * self._count[link] / ways[here]
                            share[link] = share.get(link, 0.0) + taken
                            before[there] = before.get(there, 0.0) + taken
                through = before
            self._found[source, target] = np.array(list(share), dtype=np.int64), np.array(list(share.values()))
        return self._found[source, target]

    def cross(self, messages: Ints, source: Ints, target: Ints, lanes: Lanes, together: Ints, floor_s: Floats) -> Hops:
        """Each message on all its shortest ways."""
        width = len(self.node_at)
        pairs, kind = np.unique(source[messages] * width + target[messages], return_inverse=True)
        parts = []
        for number, pair in enumerate(pairs.tolist()):
            link, share = self._pair(*divmod(pair, width))
            chosen = messages[kind == number]
            parts.append(Hops(np.repeat(chosen, len(link)), np.tile(link, len(chosen)), np.tile(share, len(chosen))))
        return join(parts)

    def distance(self, source: Ints, target: Ints, out_nic: Ints, in_nic: Ints) -> Ints:
        """Edges of a shortest way, without those from a node to its switch."""
        found = [
            0 if a == b else self._tree(self.node_at[a])[0][self.node_at[b]] - int(self.hangs[a]) - int(self.hangs[b])
            for a, b in zip(source.tolist(), target.tolist(), strict=True)
        ]
        return np.maximum(np.array(found, dtype=np.int64), 0)

    def find(self, fault: Fault) -> Ints:
        """The edge between two vertices, both ways."""
        number = {vertex: index for index, vertex in enumerate(self.vertices)}
        ends = [str(end) if str(end) in number else f"{NODE}{end}" for end in fault.ends or ()]
        for end, given in zip(ends, fault.ends or (), strict=True):
            if end not in number:
                raise no_such_link(fault, f"the graph has no vertex {given}{nearest(str(given), self.vertices[:1000])}")
        if len(ends) != 2 or (number[ends[0]], number[ends[1]]) not in self.links:
            beside = [self.vertices[b] for a, b in self.links if ends and a == number[ends[0]]]
            raise no_such_link(fault, f"{ends[0] if ends else 'a vertex'} is joined to {', '.join(beside[:10])}")
        link = self.links[number[ends[0]], number[ends[1]]]
        return np.array(sorted((link, link ^ 1)))

    def name(self, link: int) -> str:
        """Such as ``leaf:0 -> spine:1``."""
        a, b = self.ends[link]
        return f"{self.vertices[a]} -> {self.vertices[b]}"
