"""All-to-all: each member has ``size / p`` bytes for every member; ``size_bytes`` is what one holds in all.

Source: Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521 (pairwise); NCCL,
grouped ncclSend and ncclRecv (direct); DeepEP, README (hierarchical).
"""

from __future__ import annotations

import numpy as np

from .shape import Collective, GroupShape, Ints, Phase, Schedule, Transfer, pairs, step

MOST_SHIFTS, LEAST_SHIFTS, MOST_EDGES = 48, 8, 400_000
"""How many partners stand for all of them where there are more, evenly spread; fewer in huge groups."""


def _shifts(ranks: int, last: int | None = None) -> tuple[Ints, float]:
    """Distances to partners, 1 to ``last`` (all), and how many each stands for."""
    count = ranks - 1 if last is None else last
    most = max(LEAST_SHIFTS, min(MOST_SHIFTS, MOST_EDGES // ranks))
    if count <= most:
        return np.arange(1, count + 1), 1.0
    chosen = np.unique(np.linspace(1, count, most).astype(np.int64))
    return chosen, count / len(chosen)


def _exchange(ranks: int, shift: int, blocks_of: int) -> tuple[Transfer, ...]:
    return tuple(Transfer(i, (i + shift) % ranks, (i * blocks_of + (i + shift) % ranks,)) for i in range(ranks))


class PairwiseAllToAll(Collective):
    """``p - 1`` steps; in step r member i sends to ``i + r`` and waits for ``i - r``."""

    name = "pairwise"
    op = "all_to_all"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase a step; with many ranks, of some of the steps, repeated."""
        p = group.ranks
        member = np.arange(p)
        shifts, repeat = _shifts(p)
        return tuple(step(member, (member + r) % p, size_bytes / p, group, repeat=repeat) for r in shifts)

    def schedule(self, group: GroupShape) -> Schedule:
        """Block ``i p + j`` goes from i to j."""
        p = group.ranks
        return Schedule(p * p, tuple(_exchange(p, r, p) for r in range(1, p)))


class DoubleSpreadAllToAll(Collective):
    """Pairwise both ways round at once: in step r to ``i + r`` and to ``i - r``.

    Source: Fujitsu MPI's name for its default (doublespread); how it pairs is taken from the name.
    """

    name = "double_spread"
    op = "all_to_all"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase a step; with many ranks, of some of the steps, repeated."""
        p = group.ranks
        member = np.arange(p)
        half = (p - 1) // 2
        chosen, repeat = _shifts(p, half)
        phases = []
        for r in chosen:
            source, target = np.tile(member, 2), np.concatenate([(member + r) % p, (member - r) % p])
            phases.append(step(source, target, size_bytes / p, group, repeat=repeat))
        if p % 2 == 0:
            phases.append(step(member, (member + p // 2) % p, size_bytes / p, group))
        return tuple(phases)

    def schedule(self, group: GroupShape) -> Schedule:
        """Blocks as in the pairwise one."""
        p = group.ranks
        rounds = [(*_exchange(p, r, p), *_exchange(p, p - r, p)) for r in range(1, (p - 1) // 2 + 1)]
        if p % 2 == 0:
            rounds.append(_exchange(p, p // 2, p))
        return Schedule(p * p, tuple(rounds))


class DirectAllToAll(Collective):
    """All messages posted at once."""

    name = "direct"
    op = "all_to_all"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase; with many ranks, some of the edges stand for all."""
        p = group.ranks
        if p == 1:
            return ()
        member = np.arange(p)
        shifts, stands_for = _shifts(p)
        source, target = np.tile(member, len(shifts)), np.concatenate([(member + r) % p for r in shifts])
        across = group.crosses(source, target)
        return (
            Phase(
                pairs(source, target),
                size_bytes / p,
                inside_steps=0.0 if across else 1.0,
                across_steps=1.0 if across else 0.0,
                share=np.full(len(source), stands_for),
                message=True,
            ),
        )

    def schedule(self, group: GroupShape) -> Schedule:
        """One round."""
        p = group.ranks
        return Schedule(p * p, (tuple(t for r in range(1, p) for t in _exchange(p, r, p)),))


class HierarchicalAllToAll(Collective):
    """In the node to the place that the data is for, then across between equal places."""

    name = "hierarchical"
    op = "all_to_all"

    def refuses(self, group: GroupShape) -> str:
        """Needs nodes alike."""
        return "" if group.even else "its nodes hold different numbers of members"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """Two phases, each a direct exchange."""
        q, nodes = group.members_per_node, group.nodes
        member = np.arange(group.ranks)
        node, place = member // q, member % q
        phases = []
        if q > 1:
            target = np.concatenate([node * q + (place + r) % q for r in range(1, q)])
            phases.append(Phase(pairs(np.tile(member, q - 1), target), size_bytes / q, inside_steps=1.0, message=True))
        if nodes > 1:
            shifts, stands_for = _shifts(nodes)
            target = np.concatenate([(node + r) % nodes * q + place for r in shifts])
            source = np.tile(member, len(shifts))
            share = np.full(len(source), stands_for)
            phases.append(Phase(pairs(source, target), size_bytes / nodes, across_steps=1.0, share=share, message=True))
        return tuple(phases)

    def schedule(self, group: GroupShape) -> Schedule:
        """Blocks as in the pairwise one."""
        p, q, nodes = group.ranks, group.members_per_node, group.nodes
        inside, across = [], []
        for member in range(p):
            node, place = divmod(member, q)
            for other in range(q):
                if other != place:
                    blocks = tuple(member * p + n * q + other for n in range(nodes))
                    inside.append(Transfer(member, node * q + other, blocks))
            for n in range(nodes):
                if n != node:
                    # Of all members of this node, what is for this place on that node.
                    blocks = tuple((node * q + m) * p + n * q + place for m in range(q))
                    across.append(Transfer(member, n * q + place, blocks))
        return Schedule(p * p, tuple(tuple(sends) for sends in (inside, across) if sends))
