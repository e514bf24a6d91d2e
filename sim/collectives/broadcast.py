"""Broadcasts from member 0: binomial tree; scatter and all-gather.

Source: Thakur, Rabenseifner and Gropp 2005, doi 10.1177/1094342005051521 (both); Chan et al.
2007, doi 10.1002/cpe.1206 (scatter and all-gather, after van de Geijn).
"""

from __future__ import annotations

import numpy as np

from .ring import RingAllGather
from .shape import Collective, GroupShape, Phase, Schedule, Transfer, step


class BinomialBroadcast(Collective):
    """All that have the buffer send it on, at half the distance each time: ``ceil(log2 p)`` steps."""

    name = "binomial"
    op = "broadcast"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase a step."""
        return tuple(
            step(np.array(sources), np.array(sources) + distance, size_bytes, group)
            for distance, sources in _levels(group.ranks)
        )

    def schedule(self, group: GroupShape) -> Schedule:
        """One block."""
        return Schedule(
            1, tuple(tuple(Transfer(s, s + d, (0,)) for s in sources) for d, sources in _levels(group.ranks))
        )


def _levels(ranks: int) -> list[tuple[int, list[int]]]:
    """Distance and senders of each step."""
    levels = []
    distance = 1 << (ranks - 1).bit_length() >> 1
    while distance:
        levels.append((distance, [s for s in range(0, ranks, 2 * distance) if s + distance < ranks]))
        distance //= 2
    return levels


class ScatterAllGatherBroadcast(Collective):
    """Shards down a binomial tree, then a ring all-gather of them."""

    name = "scatter_all_gather"
    op = "broadcast"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """The scatter's steps, then the ring."""
        p = group.ranks
        phases = []
        for distance, senders in _levels(p):
            source = np.array(senders)
            held = np.minimum(distance, p - source - distance)
            most = int(held.max())
            phases.append(step(source, source + distance, most / p * size_bytes, group, share=held / most))
        return (*phases, *RingAllGather().phases(size_bytes, group))

    def schedule(self, group: GroupShape) -> Schedule:
        """Block i belongs to member i in between."""
        p = group.ranks
        scatter = tuple(
            tuple(Transfer(s, s + d, tuple(range(s + d, min(s + 2 * d, p)))) for s in sources)
            for d, sources in _levels(p)
        )
        return Schedule(p, (*scatter, *RingAllGather().schedule(group).rounds))
