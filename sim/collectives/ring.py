"""Ring collectives: every member sends to the next one, all at once.

Source: Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002 (the algorithm);
NCCL-tests, doc/PERFORMANCE.md (the bytes over each link).
"""

from __future__ import annotations

from .shape import CollectiveShape


class RingAllReduce:
    """A reduce-scatter, then an all-gather: ``2 (p - 1)`` steps of ``size / p`` bytes."""

    name = "ring"
    op = "all_reduce"

    def shape(self, size_bytes: float, ranks: int) -> CollectiveShape:
        """What each edge of the ring carries, and in how many steps.

        Args:
            size_bytes: Buffer of each rank.
            ranks: Members, p.

        >>> RingAllReduce().shape(8.0, 4)
        CollectiveShape(edge_bytes=12.0, steps=6)
        """
        return CollectiveShape(2 * (ranks - 1) / ranks * size_bytes, 2 * (ranks - 1))


class RingAllGather:
    """``p - 1`` steps, each member's shard travelling once round."""

    name = "ring"
    op = "all_gather"

    def shape(self, size_bytes: float, ranks: int) -> CollectiveShape:
        """As above; ``size_bytes`` is the gathered buffer.

        >>> RingAllGather().shape(8.0, 4)
        CollectiveShape(edge_bytes=6.0, steps=3)
        """
        return CollectiveShape((ranks - 1) / ranks * size_bytes, ranks - 1)


class RingReduceScatter:
    """The mirror of the all-gather."""

    name = "ring"
    op = "reduce_scatter"

    def shape(self, size_bytes: float, ranks: int) -> CollectiveShape:
        """As above; ``size_bytes`` is the buffer before it is scattered."""
        return RingAllGather().shape(size_bytes, ranks)
