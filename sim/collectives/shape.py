"""What a collective asks of the network, whatever the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CollectiveShape:
    """Bytes over each edge of the algorithm's graph, and the steps that pay a latency."""

    edge_bytes: float
    steps: int


class Collective(Protocol):
    """One algorithm of one operation. ``p`` ranks; one rank alone sends nothing."""

    name: str
    op: str

    def shape(self, size_bytes: float, ranks: int) -> CollectiveShape:
        """What each edge carries for a buffer of ``size_bytes``, and in how many steps."""
