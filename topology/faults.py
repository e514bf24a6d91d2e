"""Links that do less than they should."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

End = int | str


@dataclass(frozen=True)
class Fault:
    """A link, in both directions, that carries a fraction of its bandwidth.

    Node numbers are the machine's own, as a node list names them.

    Attributes:
        kind: ``nic``, a port of a node; ``link``, between two devices of a node, or a device and its
            node's ``switch``; ``fabric``, a link beyond the nodes.
        factor: What is left, 0 to 1; 0 has failed, and routes look for another way.
        node: The node, for ``nic`` and ``link``.
        name: The port's name, for ``nic``.
        ends: The ends of a ``link`` (device numbers) or of a ``fabric`` link: two groups of a dragonfly,
            two nodes of a torus, ``("leaf:SET:RAIL", "spine")`` or ``("spine:POD:PLANE", "core")`` of a fat
            tree, two vertices of a graph.
    """

    kind: Literal["nic", "link", "fabric"]
    factor: float = 0.0
    node: int | None = None
    name: str | None = None
    ends: tuple[End, End] | None = None

    def __str__(self) -> str:
        """The fault as an error names it."""
        if self.kind == "nic":
            return f"nic {self.name} of node {self.node}"
        ends = " - ".join(map(str, self.ends or ()))
        return f"link {ends} of node {self.node}" if self.kind == "link" else f"fabric link {ends}"
