"""All-reduce inside the switch of a node: NVLink SHARP, and its tree over several nodes.

A member asks the switch for its share of the sum, which the switch makes of everybody's
buffers, and hands the sum back for the switch to send to all: each direction of a member's
links carries ``size (1 + 1 / q)``.

Source: NCCL, src/device/all_reduce.h (RunWorkColl for NVLS and NVLS_TREE); Klenk et al. 2020,
doi 10.1109/ISCA45697.2020.00085 (multicast and reduction in the switch).
"""

from __future__ import annotations

import math

import numpy as np

from .shape import Collective, GroupShape, Ints, Phase, Schedule, Transfer, pairs
from .tree import tree_edges, tree_rounds


def _switch_edges(group: GroupShape) -> Ints:
    members = np.arange(group.ranks)
    switch = group.ranks + members // group.members_per_node
    return np.concatenate([pairs(members, switch), pairs(switch, members)])


class _InSwitch(Collective):
    op = "all_reduce"
    in_network = True

    def refuses(self, group: GroupShape) -> str:
        """Needs a switch in each node, and more than two members on it."""
        if not group.even:
            return "its nodes hold different numbers of members"
        if not group.switched or group.members_per_node < 2:
            return "its members do not share a node's switch"
        return ""

    def schedule(self, group: GroupShape) -> Schedule:
        """Buffers up, shares down; trees of the shares over the nodes; sums up, and down to all."""
        q, nodes = group.members_per_node, group.nodes
        every = tuple(range(2 * q))
        up, down, back, out = [], [], [], []
        for member in range(group.ranks):
            switch, place = group.ranks + member // q, member % q
            mine = (2 * place, 2 * place + 1)
            up.append(Transfer(member, switch, every, add=True))
            down.append(Transfer(switch, member, mine))
            back.append(Transfer(member, switch, mine))
            out.append(Transfer(switch, member, every))
        between: list[list[Transfer]] = []
        if nodes > 1:
            rails = [
                tree_rounds(nodes, ((2 * place,), (2 * place + 1,)), [n * q + place for n in range(nodes)])
                for place in range(q)
            ]
            between = [[t for rail in rails for t in rail[r]] for r in range(len(rails[0]))]
        rounds = (tuple(up), tuple(down), *(tuple(sends) for sends in between), tuple(back), tuple(out))
        return Schedule(2 * q, rounds)


class InSwitchAllReduce(_InSwitch):
    """One node."""

    name = "nvls"

    def refuses(self, group: GroupShape) -> str:
        """One node."""
        return super().refuses(group) or ("" if group.nodes == 1 else "its members stand on several nodes")

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase, two steps."""
        if group.ranks == 1:
            return ()
        return (Phase(_switch_edges(group), (1 + 1 / group.ranks) * size_bytes, switch_steps=2.0),)


class InSwitchTreeAllReduce(_InSwitch):
    """Several nodes: each place runs a double tree over the nodes with its share of the sum."""

    name = "nvls_tree"

    def refuses(self, group: GroupShape) -> str:
        """Several nodes."""
        return super().refuses(group) or ("" if group.nodes > 1 else "its members stand on one node")

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase, since the pieces flow through all of it at once."""
        if group.ranks == 1:
            return ()
        q, nodes = group.members_per_node, group.nodes
        inside = _switch_edges(group)
        trees = tree_edges(nodes)
        rails = np.concatenate([trees * q + place for place in range(q)])
        share = np.concatenate([np.full(len(inside), 1 + 1 / q), np.full(len(rails), 0.5 / q)])
        return (
            Phase(
                np.concatenate([inside, rails]),
                size_bytes,
                switch_steps=2.0,
                across_steps=2.0 * math.ceil(math.log2(nodes)),
                share=share,
            ),
        )
