"""What follows the last backward pass, and what of it runs beside a pass: gradients reduced, weights gathered.

A rank's gradients can be reduced piece by piece while its last backward still makes them,
and its new weights gathered piece by piece while the next step's first forward already
uses those that have come. Steps being alike, that gathering is played at the step's start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .network import TrafficClasses


@dataclass(frozen=True)
class Exchange:
    """One phase of a collective: coflows that start together, each edge carrying as much.

    Attributes:
        flows: Their classes.
        edge_bytes: Over each edge.
        latency_s: Before the bytes.
        group: Whose collective it is a phase of: ``dp``, ``edp``, ``shard``, ``hybrid`` or ``embedding``.
        op: What that does, such as ``all_reduce``.
        fixed_s: The part of ``latency_s`` that a smaller buffer would have too; left out: all of it.
    """

    flows: tuple[int, ...]
    edge_bytes: float
    latency_s: float
    group: str = "dp"
    op: str = "all_reduce"
    fixed_s: float | None = None

    def part(self, share: float) -> Exchange:
        """The same for a share of the buffer."""
        if share == 1.0:
            return self
        fixed_s = self.latency_s if self.fixed_s is None else self.fixed_s
        latency_s = fixed_s + share * (self.latency_s - fixed_s)
        return replace(self, edge_bytes=share * self.edge_bytes, latency_s=latency_s)

    def alone_s(self, classes: TrafficClasses) -> float:
        """Seconds while it shares no link: at the pace of its slowest flow."""
        rate = min((classes.solo[flow] for flow in self.flows), default=math.inf)
        if self.edge_bytes <= 0 or math.isinf(rate):
            return 0.0
        return self.latency_s + self.edge_bytes / rate


Collective = tuple[Exchange, ...]


def alone_s(collective: Collective, classes: TrafficClasses) -> float:
    """Seconds of a collective that shares no link: its phases in turn."""
    return sum(exchange.alone_s(classes) for exchange in collective)


@dataclass(frozen=True)
class Piece:
    """A part of a rank's buffer that travels by itself: the gradients or the weights of a layer.

    Attributes:
        chunk: The virtual stage of the rank that it belongs to.
        at: Of that chunk's pass: where a backward has made the gradients, or a forward needs the weights.
        share: Of the rank's bytes.
    """

    chunk: int
    at: float
    share: float

    def of(self, collective: Collective) -> Collective:
        """A collective over this piece alone."""
        return tuple(exchange.part(self.share) for exchange in collective)


WHOLE = (Piece(0, 1.0, 1.0),)


@dataclass(frozen=True)
class Tail:
    """What follows the last backward pass.

    A tied embedding is reduced between the ranks of its two copies in each replica, gradients
    over the replicas, a few of them over the tensor group; the norm of all gradients makes
    every rank wait for every other; then the optimizer, and the gathering of what it wrote.

    Attributes:
        embedding: Of each lane; empty where there is one copy.
        reduce: Of each pipeline rank, over all lanes.
        gather: Likewise, for the parameters.
        barrier_s: The reduction of the norm itself.
        optimizer_s: Optimizer of a rank.
        overhead_s: Host work once a step.
        embedding_ranks: Pipeline ranks of the two copies; left out: the first and the last.
        reduce_pieces: Of each rank, in the order in which they travel; left out: whole, after its last backward.
        gather_pieces: Of each rank, in the order in which the first forward needs them, which they then run beside;
            left out: whole, after the optimizer.
        slowdown: Of computing beside communication, at least 1.
        sums_s: Of each rank, once its gradients are reduced: its tensor group sums those that each of its ranks has
            a part of; left out: nothing.
    """

    embedding: tuple[Collective, ...]
    reduce: tuple[Collective, ...]
    gather: tuple[Collective, ...]
    barrier_s: float
    optimizer_s: tuple[float, ...]
    overhead_s: float
    embedding_ranks: tuple[int, int] | None = None
    reduce_pieces: tuple[tuple[Piece, ...], ...] = ()
    gather_pieces: tuple[tuple[Piece, ...], ...] = ()
    slowdown: float = 1.0
    sums_s: tuple[float, ...] = ()

    @property
    def copies(self) -> tuple[int, int]:
        """Pipeline ranks of the two copies of a tied embedding."""
        return self.embedding_ranks or (0, len(self.reduce) - 1)

    def sum_s(self, rank: int) -> float:
        """Seconds that a rank's tensor group sums gradients."""
        return self.sums_s[rank] if self.sums_s else 0.0

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """What a rank's gradients travel in."""
        return self.reduce_pieces[rank] if self.reduce_pieces and self.reduce[rank] else WHOLE

    @property
    def gathers_late(self) -> bool:
        """Whether the weights are gathered after the optimizer, and not beside the next forward."""
        return not self.gather_pieces


@dataclass(frozen=True)
class TailTimes:
    """Seconds that the parts of the tail took, and the end of the step.

    Attributes:
        embedding_s: Of a rank, a lane; waiting for the other copy is not in it.
        reduce_s: Of a rank; from the last lane's arrival where it runs after the backward.
        gather_s: Of a rank.
        step_s: End of the step.
        reduce_wait_s: The part of ``reduce_s`` that a rank stands waiting for; left out: all of it.
    """

    embedding_s: tuple[tuple[float, ...], ...]
    reduce_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    step_s: float
    reduce_wait_s: tuple[float, ...] = ()

    def exposed_reduce_s(self, rank: int) -> float:
        """Seconds that a rank waits for its gradients."""
        return self.reduce_wait_s[rank] if self.reduce_wait_s else self.reduce_s[rank]


def gathered_s(tail: Tail, classes: TrafficClasses) -> list[list[float]]:
    """When each piece of each rank's weights is there, gathered from the start of the step at solo rates."""
    if tail.gathers_late:
        return []
    times = []
    for collective, pieces in zip(tail.gather, tail.gather_pieces, strict=True):
        now, row = 0.0, []
        for piece in pieces:
            now += alone_s(piece.of(collective), classes)
            row.append(now)
        times.append(row)
    return times


@dataclass(frozen=True)
class Gate:
    """What a chunk's first forward has to wait for.

    Attributes:
        at: Where in the forward each piece of the weights is needed, rising.
        there_s: When it is there.
        over_s: When the last of the rank's pieces is there; until then communication runs beside the forward.
        slowdown: Of computing beside communication.
    """

    at: tuple[float, ...]
    there_s: tuple[float, ...]
    over_s: float
    slowdown: float = 1.0

    def passed(self, ready_s: float, pass_s: float) -> float:
        """When a forward ends whose input and device are ready at ``ready_s``.

        A segment between two pieces that begins while pieces are under way runs slower throughout.

        >>> Gate((0.0, 0.5), (1.0, 4.0), over_s=4.0).passed(0.0, pass_s=2.0)
        5.0
        """
        now = ready_s
        for here, there_s, following in zip(self.at, self.there_s, (*self.at[1:], 1.0), strict=True):
            now = max(now, there_s)
            now += (following - here) * pass_s * (self.slowdown if now < self.over_s else 1.0)
        return now


def gates_of(tail: Tail, there_s: Sequence[Sequence[float]]) -> list[dict[int, Gate]]:
    """Of each rank and chunk what its first forward waits for."""
    gates = []
    for pieces, times in zip(tail.gather_pieces, there_s, strict=True):
        row = {}
        for chunk in {piece.chunk for piece in pieces}:
            mine = [(piece.at, at) for piece, at in zip(pieces, times, strict=True) if piece.chunk == chunk]
            row[chunk] = Gate(tuple(at for at, _ in mine), tuple(at for _, at in mine), times[-1], tail.slowdown)
        gates.append(row)
    return gates


def slowed_s(pass_s: float, pieces: Sequence[tuple[float, float]], slowdown: float) -> float:
    """A last backward beside which its own gradients are reduced.

    Args:
        pass_s: What it takes alone.
        pieces: Where in it each piece is made, rising, and the piece's seconds on the network.
        slowdown: Of computing beside communication.

    >>> slowed_s(4.0, [(0.5, 1.0), (1.0, 1.0)], slowdown=1.5)
    5.0
    """
    now = before = over = 0.0
    for at, seconds in pieces:
        now += (at - before) * pass_s * (slowdown if now < over else 1.0)
        over = max(over, now) + seconds
        before = at
    return now + (1.0 - before) * pass_s * (slowdown if now < over else 1.0)
