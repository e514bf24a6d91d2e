"""One message from one rank to another."""

from __future__ import annotations

from .shape import CollectiveShape


class PointToPoint:
    """The whole message over one edge, one latency (Hockney 1994, doi 10.1016/S0167-8191(06)80021-9)."""

    name = "direct"
    op = "send"

    def shape(self, size_bytes: float, ranks: int) -> CollectiveShape:
        """``ranks`` is 2; a message to oneself moves nothing."""
        return CollectiveShape(size_bytes if ranks > 1 else 0.0, 1 if ranks > 1 else 0)
