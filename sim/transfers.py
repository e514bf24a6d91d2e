"""What events are made of beside the actions of a schedule: collectives over the network, and who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import simpy

from .network import Network, TrafficClasses
from .tail import Collective, Piece, Tail

Process = Generator[simpy.Event, Any, None]


class Environment(simpy.Environment):
    """An environment that counts its events."""

    def __init__(self, initial_time: float = 0.0) -> None:
        super().__init__(initial_time)
        self.events = 0

    def step(self) -> None:
        """One event, counted."""
        self.events += 1
        super().step()


class Meeting:
    """Processes that go on together once all have come, and the seconds of what they then do."""

    def __init__(self, env: simpy.Environment, parties: int) -> None:
        self.left = parties
        self.done = env.event()
        self.came = 0.0
        self.seconds = 0.0

    def come(self, now: float) -> bool:
        """One more is here; whether it was the last."""
        self.left -= 1
        self.came = now
        return self.left == 0


class Transfers:
    """The network and what runs collectives over it."""

    def __init__(self, env: simpy.Environment, classes: TrafficClasses) -> None:
        self.env = env
        self.classes = classes
        self.network = Network(env, classes)

    def start(self, flows: tuple[int, ...], sizes: list[float]) -> simpy.Event:
        """Begin coflows together; the event fires when the last has ended."""
        events = [self.network.start(flow, size) for flow, size in zip(flows, sizes, strict=True)]
        return events[0] if len(events) == 1 else self.env.all_of(events)

    def run(self, collective: Collective) -> Process:
        """A collective, its phases in turn."""
        for exchange in collective:
            flows = tuple(flow for flow in exchange.flows if not math.isinf(self.classes.solo[flow]))
            if flows and exchange.edge_bytes > 0:
                yield self.env.timeout(exchange.latency_s)
                yield self.start(flows, [exchange.edge_bytes] * len(flows))


class Gathering:
    """New weights on their way while the first forward runs: an event for each piece of each rank."""

    def __init__(self, env: simpy.Environment, transfers: Transfers, tail: Tail) -> None:
        self.env = env
        self.there = [[env.event() for _ in pieces] for pieces in tail.gather_pieces]
        self.there_s = [[0.0] * len(pieces) for pieces in tail.gather_pieces]
        for rank, pieces in enumerate(tail.gather_pieces):
            env.process(self._rank(transfers, rank, tail.gather[rank], pieces))

    def _rank(self, transfers: Transfers, rank: int, collective: Collective, pieces: tuple[Piece, ...]) -> Process:
        for number, piece in enumerate(pieces):
            yield from transfers.run(piece.of(collective))
            self.there_s[rank][number] = self.env.now
            self.there[rank][number].succeed()


def gathered_together(tail: Tail, classes: TrafficClasses) -> tuple[list[list[float]], int, int]:
    """When each piece of each rank's weights is there, the events that tell, and the solves."""
    if tail.gathers_late:
        return [], 0, 0
    env = Environment()
    transfers = Transfers(env, classes)
    gathering = Gathering(env, transfers, tail)
    env.run()
    return gathering.there_s, env.events, transfers.network.solves
