"""Ring collectives: every member sends to the next one, all at once.

Source: Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002 (the algorithm);
NCCL-tests, doc/PERFORMANCE.md (the bytes over each link).
"""

from __future__ import annotations

from dataclasses import replace

from .shape import Collective, GroupShape, Phase, Schedule, Transfer, ring_phase


def _round_trip(ranks: int, shift: int, *, add: bool) -> tuple[tuple[Transfer, ...], ...]:
    """``p - 1`` rounds; in round r member i sends block ``i + shift - r`` on."""
    return tuple(
        tuple(Transfer(i, (i + 1) % ranks, ((i + shift - r) % ranks,), add) for i in range(ranks))
        for r in range(ranks - 1)
    )


class RingAllReduce(Collective):
    """A reduce-scatter, then an all-gather: ``2 (p - 1)`` steps of ``size / p`` bytes.

    >>> RingAllReduce().shape(8.0, 4)
    CollectiveShape(edge_bytes=12.0, steps=6)
    """

    name = "ring"
    op = "all_reduce"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase: both halves run over the same ring without a stop."""
        p = group.ranks
        if p == 1:
            return ()
        phase = ring_phase(2 * (p - 1) / p * size_bytes, 2 * (p - 1), group)
        return (replace(phase, reduce_bytes=(p - 1) / p * size_bytes),)

    def schedule(self, group: GroupShape) -> Schedule:
        """Block i ends its first trip at member i, and starts the second there."""
        p = group.ranks
        return Schedule(p, _round_trip(p, -1, add=True) + _round_trip(p, 0, add=False))


class RingAllGather(Collective):
    """``p - 1`` steps, each member's shard travelling once round; ``size_bytes`` is the gathered buffer.

    >>> RingAllGather().shape(8.0, 4)
    CollectiveShape(edge_bytes=6.0, steps=3)
    """

    name = "ring"
    op = "all_gather"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase over the ring."""
        p = group.ranks
        return (ring_phase((p - 1) / p * size_bytes, p - 1, group),) if p > 1 else ()

    def schedule(self, group: GroupShape) -> Schedule:
        """Block i starts at member i."""
        return Schedule(group.ranks, _round_trip(group.ranks, 0, add=False))


class RingReduceScatter(Collective):
    """The mirror of the all-gather; ``size_bytes`` is the buffer before it is scattered."""

    name = "ring"
    op = "reduce_scatter"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase over the ring."""
        return tuple(
            replace(phase, reduce_bytes=phase.edge_bytes) for phase in RingAllGather().phases(size_bytes, group)
        )

    def schedule(self, group: GroupShape) -> Schedule:
        """Block i ends at member i."""
        return Schedule(group.ranks, _round_trip(group.ranks, -1, add=True))


class RingBroadcast(Collective):
    """The root's buffer, handed on from member to member in pieces.

    The pieces are taken to be small, so that every link of the chain is busy at once.
    Source: NCCL, src/device/broadcast.h.
    """

    name = "ring"
    op = "broadcast"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One phase: all edges of the ring; the last, back to the root, is counted though it is idle."""
        return (replace(ring_phase(size_bytes, group.ranks - 1, group), step_bytes=0.0),) if group.ranks > 1 else ()

    def schedule(self, group: GroupShape) -> Schedule:
        """One block, from 0 to the last."""
        return Schedule(1, tuple((Transfer(i, i + 1, (0,)),) for i in range(group.ranks - 1)))
