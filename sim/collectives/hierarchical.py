"""In the node, then across: each place of a node has its own ring over the nodes.

Source: the composition that NCCL's and Horovod's hierarchical all-reduce share (Sergeev and
Del Balso 2018, arXiv 1802.05799, and its option HOROVOD_HIERARCHICAL_ALLREDUCE).
"""

from __future__ import annotations

from dataclasses import replace

from .ring import RingAllGather, RingAllReduce, RingReduceScatter
from .shape import Collective, GroupShape, Phase, Schedule, Transfer


def _rings(edges: str, edge_bytes: float, steps: int, *, reduced: float = 0.0) -> Phase:
    if edges == "node_rings":
        return Phase("node_rings", edge_bytes, inside_steps=steps, step_bytes=edge_bytes / steps, reduce_bytes=reduced)
    return Phase("rail_rings", edge_bytes, across_steps=steps, step_bytes=edge_bytes / steps, reduce_bytes=reduced)


class _Hierarchical(Collective):
    name = "hierarchical"

    def refuses(self, group: GroupShape) -> str:
        """Needs nodes alike."""
        return "" if group.even else "its nodes hold different numbers of members"


def _inside(ring: Collective, group: GroupShape) -> list[tuple[Transfer, ...]]:
    """A ring over the q members of a node, on all nodes; block b stands for the N blocks of place b."""
    q, nodes = group.members_per_node, group.nodes
    return [
        tuple(
            Transfer(
                n * q + t.source,
                n * q + t.target,
                tuple(b * nodes + k for b in t.blocks for k in range(nodes)),
                t.add,
            )
            for n in range(nodes)
            for t in sends
        )
        for sends in ring.schedule(GroupShape(q)).rounds
    ]


def _across(ring: Collective, group: GroupShape) -> list[tuple[Transfer, ...]]:
    """A ring over N nodes, for all places; place l works on its own N blocks."""
    q, nodes = group.members_per_node, group.nodes
    return [
        tuple(
            Transfer(t.source * q + place, t.target * q + place, tuple(place * nodes + b for b in t.blocks), t.add)
            for place in range(q)
            for t in sends
        )
        for sends in ring.schedule(GroupShape(nodes)).rounds
    ]


def _own_numbers(rounds: list[tuple[Transfer, ...]], group: GroupShape) -> tuple[tuple[Transfer, ...], ...]:
    """Blocks numbered as the members they belong to, rather than place by place."""
    q, nodes = group.members_per_node, group.nodes
    number = {place * nodes + n: n * q + place for place in range(q) for n in range(nodes)}
    return tuple(
        tuple(t._replace(blocks=tuple(number[block] for block in t.blocks)) for t in sends) for sends in rounds
    )


class HierarchicalAllReduce(_Hierarchical):
    """Reduce-scatter in the node, all-reduce of ``size / q`` across, all-gather in the node."""

    op = "all_reduce"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """Three phases, or those that have something to move."""
        if group.ranks == 1:
            return ()
        q, nodes = group.members_per_node, group.nodes
        inner = (q - 1) / q * size_bytes
        outer = (nodes - 1) / nodes * size_bytes / q
        phases: list[Phase] = []
        if q > 1:
            phases.append(_rings("node_rings", inner, q - 1, reduced=inner))
        if nodes > 1:
            phases.append(_rings("rail_rings", 2 * outer, 2 * (nodes - 1), reduced=outer))
        if q > 1:
            phases.append(_rings("node_rings", inner, q - 1))
        return tuple(phases)

    def schedule(self, group: GroupShape) -> Schedule:
        """Rings over ``q N`` blocks."""
        scatter, gather = _inside(RingReduceScatter(), group), _inside(RingAllGather(), group)
        return Schedule(group.ranks, (*scatter, *_across(RingAllReduce(), group), *gather))


class HierarchicalAllGather(_Hierarchical):
    """All-gather across at each place, then in the node."""

    op = "all_gather"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """Two phases."""
        q, nodes = group.members_per_node, group.nodes
        phases: list[Phase] = []
        if nodes > 1:
            phases.append(_rings("rail_rings", (nodes - 1) / nodes * size_bytes / q, nodes - 1))
        if q > 1:
            phases.append(_rings("node_rings", (q - 1) / q * size_bytes, q - 1))
        return tuple(phases)

    def schedule(self, group: GroupShape) -> Schedule:
        """Member ``n q + l`` starts with block ``n q + l``."""
        rounds = _across(RingAllGather(), group) + _inside(RingAllGather(), group)
        return Schedule(group.ranks, _own_numbers(rounds, group))


class HierarchicalReduceScatter(_Hierarchical):
    """The all-gather backwards, adding."""

    op = "reduce_scatter"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """Two phases."""
        forward = HierarchicalAllGather().phases(size_bytes, group)
        return tuple(replace(phase, reduce_bytes=phase.edge_bytes) for phase in reversed(forward))

    def schedule(self, group: GroupShape) -> Schedule:
        """Member ``n q + l`` ends with block ``n q + l``."""
        rounds = _inside(RingReduceScatter(), group) + _across(RingReduceScatter(), group)
        return Schedule(group.ranks, _own_numbers(rounds, group))
