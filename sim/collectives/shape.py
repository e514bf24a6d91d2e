"""What a collective asks of the network: phases of edges between members, whatever the machine.

Members of a group are numbered ``0 .. ranks - 1``, node by node. A switch that
reduces is one more member, numbered from ``ranks`` on, one a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Rings = Literal["ring", "node_rings", "rail_rings"]


@dataclass(frozen=True)
class CollectiveShape:
    """Bytes over the busiest edge of the algorithm's graph, and the steps that pay a latency."""

    edge_bytes: float
    steps: int


@dataclass(frozen=True)
class GroupShape:
    """A group as an algorithm sees it.

    Attributes:
        ranks: Members, p.
        nodes: Nodes they stand on, N.
        members_per_node: On each node, q; 0 where the nodes hold different numbers.
        torus: The torus of the nodes where the group covers a whole job on one, else None.
        switched: Whether a node's devices hang on one switch.
        inside_bytes_per_s: What one member reaches inside its node in a ring; for choosing.
        across_bytes_per_s: What the members of one node reach together out of it.
        switch_bytes_per_s: A device's link to a switch that reduces, as printed.
    """

    ranks: int
    nodes: int = 1
    members_per_node: int = 0
    torus: tuple[int, ...] | None = None
    switched: bool = False
    inside_bytes_per_s: float = 100e9
    across_bytes_per_s: float = 25e9
    switch_bytes_per_s: float = 300e9

    def __post_init__(self) -> None:
        if self.members_per_node == 0 and self.ranks % self.nodes == 0 and self.nodes in (1, self.ranks):
            object.__setattr__(self, "members_per_node", self.ranks // self.nodes)

    @property
    def even(self) -> bool:
        """Whether every node holds as many members."""
        return self.members_per_node > 0

    def crosses(self, source: Ints, target: Ints) -> bool:
        """Whether any of these edges leaves a node."""
        if self.nodes == 1:
            return False
        if not self.even:
            return True
        real = (source < self.ranks) & (target < self.ranks)
        q = self.members_per_node
        return bool((source[real] // q != target[real] // q).any())


@dataclass(frozen=True)
class Phase:
    """Edges that carry bytes at the same time; the next phase starts when all have ended.

    Attributes:
        edges: Pairs of members, shape (E, 2), or a name: ``ring`` over all members, ``node_rings`` one ring in
            each node, ``rail_rings`` one over the nodes for each place in a node.
        edge_bytes: What an edge carries.
        inside_steps: Steps in a row that pay the latency of a node's links.
        across_steps: Steps in a row that pay that of the fabric.
        switch_steps: Trips to a reducing switch in a row.
        gate_steps: Steps in a row that the network's own hardware takes, with no software between.
        share: Part of ``edge_bytes`` that each edge carries; None where it is 1.
        message: Whether the edges are single messages rather than steps of a ring kernel.
        repeat: How often the phase happens.
        step_bytes: What one step hands on, where that is the message whose latency counts.
        segment_bytes: Pieces that a pipeline hands on; each step beyond the first adds the time of one.
        reduce_bytes: What the busiest member adds up, or copies.
        overlapped: Whether it does so while more arrives.
    """

    edges: Ints | Rings
    edge_bytes: float
    inside_steps: float = 0.0
    across_steps: float = 0.0
    switch_steps: float = 0.0
    gate_steps: float = 0.0
    share: Floats | None = None
    message: bool = False
    repeat: float = 1.0
    step_bytes: float = 0.0
    segment_bytes: float = 0.0
    reduce_bytes: float = 0.0
    overlapped: bool = False

    @property
    def steps(self) -> float:
        """All steps in a row, repetitions counted."""
        return (self.inside_steps + self.across_steps + self.switch_steps + self.gate_steps) * self.repeat

    def edge_list(self, group: GroupShape) -> Ints:
        """The edges as pairs of members."""
        if not isinstance(self.edges, str):
            return self.edges
        members = np.arange(group.ranks)
        if self.edges == "ring":
            return np.stack([members, (members + 1) % group.ranks], axis=1)
        q = group.members_per_node
        node, local = members // q, members % q
        if self.edges == "node_rings":
            return np.stack([members, node * q + (local + 1) % q], axis=1)
        return np.stack([members, (node + 1) % group.nodes * q + local], axis=1)

    def total_bytes(self, group: GroupShape) -> float:
        """Bytes over all edges, repetitions counted."""
        count = len(self.edge_list(group)) if self.share is None else float(self.share.sum())
        return count * self.edge_bytes * self.repeat


class Transfer(NamedTuple):
    """Blocks that one member sends another; ``add`` where the receiver adds them to its own."""

    source: int
    target: int
    blocks: tuple[int, ...]
    add: bool = False


@dataclass(frozen=True)
class Schedule:
    """Every block of every step, to check an algorithm by; rounds are one after the other.

    Attributes:
        blocks: How many blocks of the same size the buffer is cut into.
        rounds: The transfers of each round.
    """

    blocks: int
    rounds: tuple[tuple[Transfer, ...], ...]


class Collective(ABC):
    """One algorithm of one operation.

    Attributes:
        in_network: Whether switches or interfaces do the reduction.
    """

    name: str
    op: str
    in_network = False

    def refuses(self, group: GroupShape) -> str:
        """Why the algorithm cannot run on a group; empty where it can, as on any unless an algorithm says otherwise."""
        return ""

    @abstractmethod
    def phases(self, size_bytes: float, group: GroupShape) -> tuple[Phase, ...]:
        """The phases for a buffer of ``size_bytes``; none for one rank."""

    @abstractmethod
    def schedule(self, group: GroupShape) -> Schedule:
        """The same, block by block; for small groups."""

    def shape(self, size_bytes: float, ranks: int) -> CollectiveShape:
        """Bytes over the busiest edge, and steps, on ranks that are alike."""
        phases = self.phases(size_bytes, GroupShape(ranks))
        moved = sum(p.edge_bytes * p.repeat * (1.0 if p.share is None else float(p.share.max())) for p in phases)
        return CollectiveShape(moved, round(sum(phase.steps for phase in phases)))


def pairs(source: Ints, target: Ints) -> Ints:
    """Edges from two arrays of members."""
    return np.stack([source, target], axis=1)


def step(
    source: Ints,
    target: Ints,
    edge_bytes: float,
    group: GroupShape,
    *,
    share: Floats | None = None,
    repeat: float = 1.0,
) -> Phase:
    """One step: messages that pay one latency, the fabric's if any of them crosses it."""
    across = group.crosses(source, target)
    return Phase(
        pairs(source, target),
        edge_bytes,
        inside_steps=0.0 if across else 1.0,
        across_steps=1.0 if across else 0.0,
        share=share,
        message=True,
        repeat=repeat,
        step_bytes=edge_bytes,
    )


def ring_phase(edge_bytes: float, steps: int, group: GroupShape) -> Phase:
    """Steps of one ring over all members.

    Of the ring's ``p`` edges those between two nodes wait for the fabric, N of them, so that
    ``steps N / p`` of its steps do (NCCL, src/graph/tuning.cc, counts alike).
    """
    across = steps * group.nodes / group.ranks if group.nodes > 1 else 0.0
    return Phase("ring", edge_bytes, inside_steps=steps - across, across_steps=across, step_bytes=edge_bytes / steps)
