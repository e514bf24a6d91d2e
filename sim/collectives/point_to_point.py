"""One message from one rank to another, or to its neighbours.

Source: Hockney 1994, doi 10.1016/S0167-8191(06)80021-9 (a latency and a rate);
Intel MPI Benchmarks, user guide (Sendrecv, Exchange).
"""

from __future__ import annotations

import numpy as np

from .shape import Collective, GroupShape, Phase, Schedule, Transfer, step


class PointToPoint(Collective):
    """The whole message over one edge, one latency.

    >>> PointToPoint().shape(8.0, 2)
    CollectiveShape(edge_bytes=8.0, steps=1)
    """

    name = "direct"
    op = "send"

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """From member 0 to member 1; a message to oneself moves nothing."""
        return (step(np.array([0]), np.array([1]), size_bytes, group),) if group.ranks > 1 else ()

    def schedule(self, group: GroupShape) -> Schedule:
        """One block."""
        return Schedule(1, ((Transfer(0, 1, (0,)),),) if group.ranks > 1 else ())


class Exchange(Collective):
    """Every member sends to its right neighbour, or to both, at once (IMB's Sendrecv and Exchange)."""

    name = "direct"

    def __init__(self, op: str, both: bool) -> None:
        self.op = op
        self._both = both

    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """One step."""
        p = group.ranks
        if p == 1:
            return ()
        member = np.arange(p)
        source, target = member, (member + 1) % p
        if self._both:
            source, target = np.concatenate([member, member]), np.concatenate([target, (member - 1) % p])
        return (step(source, target, size_bytes, group),)

    def schedule(self, group: GroupShape) -> Schedule:
        """Block i is member i's."""
        p = group.ranks
        sends = [Transfer(i, (i + 1) % p, (i,)) for i in range(p)]
        if self._both:
            sends += [Transfer(i, (i - 1) % p, (i,)) for i in range(p)]
        return Schedule(p, (tuple(sends),) if p > 1 else ())
