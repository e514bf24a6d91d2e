"""Double binary tree: two trees over the nodes, each for half of the buffer, so that every node works in both.

Source: Sanders, Speck and Träff 2009, doi 10.1016/j.parco.2009.09.001 (two trees); NCCL,
src/graph/trees.cc (which trees) and src/graph/tuning.cc (a chain inside each node, the steps it counts).
"""

from __future__ import annotations

import math

import numpy as np

from .shape import Collective, GroupShape, Ints, Phase, Schedule, Transfer, pairs


def tree_parents(nodes: int, second: bool) -> list[int]:
    """Parent of each node in one of the two trees; -1 for the root.

    The first tree links a node to the one without its lowest bit, next bit up; the second
    is the first mirrored where the count is even, shifted by one where it is odd.

    >>> tree_parents(4, second=False), tree_parents(4, second=True)
    ([-1, 2, 0, 2], [1, 3, 1, -1])
    """
    parents = []
    for node in range(nodes):
        if node == 0:
            parents.append(-1)
            continue
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        parents.append(up if up < nodes else node ^ bit)
    if not second:
        return parents
    if nodes % 2 == 0:
        return [nodes - 1 - parents[nodes - 1 - i] if parents[nodes - 1 - i] >= 0 else -1 for i in range(nodes)]
    back = [parents[(i - 1) % nodes] for i in range(nodes)]
    return [(parent + 1) % nodes if parent >= 0 else -1 for parent in back]


def tree_edges(nodes: int) -> Ints:
    """Edges up and down of both trees, shape (4 (N - 1), 2); each carries half of the buffer."""
    edges = []
    for second in (False, True):
        for node, parent in enumerate(tree_parents(nodes, second)):
            if parent >= 0:
                edges += [(node, parent), (parent, node)]
    return np.array(edges, dtype=np.int64).reshape(-1, 2)


def tree_rounds(nodes: int, blocks: tuple[tuple[int, ...], tuple[int, ...]], member: list[int]) -> list[list[Transfer]]:
    """Rounds of both trees, leaves to root with adding and back; ``member[i]`` stands for node i."""
    depths = []
    for second in (False, True):
        parents = tree_parents(nodes, second)
        depths.append([_depth(parents, node) for node in range(nodes)])
    deepest = max(max(depth) for depth in depths)
    up: list[list[Transfer]] = []
    for level in range(deepest, 0, -1):
        sends = []
        for second in (False, True):
            parents = tree_parents(nodes, second)
            sends += [
                Transfer(member[node], member[parents[node]], blocks[second], add=True)
                for node in range(nodes)
                if depths[second][node] == level
            ]
        up.append(sends)
    down = [[Transfer(t.target, t.source, t.blocks) for t in sends] for sends in reversed(up)]
    return up + down


def _depth(parents: list[int], node: int) -> int:
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


class TreeAllReduce(Collective):
    """Up both trees with adding, and down again, in small pieces so that all edges work at once.

    Inside a node the members form a chain that ends at the first of them.
    """

    name = "tree"
    op = "all_reduce"

    def refuses(self, group: GroupShape) -> str:
        """Needs nodes alike."""
        return "" if group.even else "its nodes hold different numbers of members"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase: ``2 ((q - 1) + log2 N)`` steps of latency, as NCCL counts."""
        if group.ranks == 1:
            return ()
        q, nodes = group.members_per_node, group.nodes
        members = np.arange(group.ranks)
        chained = members[members % q > 0]
        edges = [pairs(chained, chained - 1), pairs(chained - 1, chained)]
        shares = [np.ones(2 * len(chained))]
        if nodes > 1:
            between = tree_edges(nodes) * q
            edges.append(between)
            shares.append(np.full(len(between), 0.5))
        return (
            Phase(
                np.concatenate(edges),
                size_bytes,
                inside_steps=2.0 * (q - 1),
                across_steps=2.0 * math.ceil(math.log2(nodes)),
                share=np.concatenate(shares),
                reduce_bytes=size_bytes,
            ),
        )

    def schedule(self, group: GroupShape) -> Schedule:
        """Chains, trees, chains."""
        q, nodes = group.members_per_node, group.nodes
        inside = [
            tuple(Transfer(n * q + i, n * q + i - 1, (0, 1), add=True) for n in range(nodes))
            for i in range(q - 1, 0, -1)
        ]
        back = [tuple(Transfer(t.target, t.source, t.blocks) for t in sends) for sends in reversed(inside)]
        between = tree_rounds(nodes, ((0,), (1,)), [n * q for n in range(nodes)]) if nodes > 1 else []
        return Schedule(2, (*inside, *(tuple(sends) for sends in between), *back))
