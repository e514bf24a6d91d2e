"""What the players of a schedule are given, and what they return.

Replicas that behave alike are one *lane*, played once and counted many times; a slow
device or a broken link puts the replicas it touches into lanes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..scenarios.schedules import BACKWARD, FORWARD, KINDS

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Program:
    """A schedule with the seconds of its actions: all that the timing of one lane depends on.

    Attributes:
        table: Actions of each stage in order, as codes (scenarios.schedules.action).
        forward_s: Forward of one micro-batch, a stage.
        backward_s: Backward of one micro-batch, a stage.
        up_s: Message from a stage to the next at its solo rate, latency aside, a boundary.
        down_s: Message back, a boundary.
        latency_s: Latency of a message, a boundary.
        send_blocks: Whether a stage waits until its message has left before it goes on.
        micro_batches: Micro-batches of a step.
        schedule: The table's name, where it has one: some have a quicker way to the same times.
        jitter: Factors on the actions' seconds, shape (stages, micro-batches, 2 for forward and backward); None for 1.
    """

    table: Sequence[Sequence[int]]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    up_s: tuple[float, ...]
    down_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    send_blocks: bool
    micro_batches: int
    schedule: str = ""
    jitter: Floats | None = None

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.table)

    def sends(self, stage: int, kind: int) -> float:
        """Seconds that the message after an action takes at its solo rate; 0 where none is sent."""
        if kind == FORWARD:
            return self.up_s[stage] if stage < self.stages - 1 else 0.0
        return self.down_s[stage - 1] if stage > 0 else 0.0

    def holds(self, stage: int, kind: int) -> float:
        """Seconds that it keeps its stage from going on."""
        return self.sends(stage, kind) if self.send_blocks else 0.0

    def receiver(self, stage: int, kind: int) -> int | None:
        """The stage that an action's message goes to; None where it sends none."""
        to = stage + 1 if kind == FORWARD else stage - 1
        return to if 0 <= to < self.stages else None

    def travels(self, stage: int, kind: int) -> float:
        """Seconds from an action's end to the arrival of its message, at the solo rate."""
        to = self.receiver(stage, kind)
        return 0.0 if to is None else self.sends(stage, kind) + self.latency_s[min(stage, to)]

    def held(self, stage: int) -> float:
        """Seconds that a whole step's messages hold a stage, at their solo rates."""
        return self.micro_batches * (self.holds(stage, FORWARD) + self.holds(stage, BACKWARD))

    def passes(self, stage: int, kind: int) -> Floats:
        """Seconds of the actions of one kind, by micro-batch."""
        seconds = self.forward_s[stage] if kind == FORWARD else self.backward_s[stage]
        if self.jitter is None:
            return np.full(self.micro_batches, seconds)
        return seconds * self.jitter[stage, :, kind]

    @property
    def queues(self) -> bool:
        """Whether a message may have to wait for the one before it: some take longer than the action that follows."""
        if self.send_blocks:
            return False
        return any(
            self.sends(stage, kind) > float(self.passes(stage, kind).min())
            for stage in range(self.stages)
            for kind in (FORWARD, BACKWARD)
        )

    def duration(self, stage: int, code: int) -> float:
        """Seconds of one action."""
        kind = code % KINDS
        seconds = self.forward_s[stage] if kind == FORWARD else self.backward_s[stage]
        if self.jitter is None:
            return seconds
        return seconds * float(self.jitter[stage, code // KINDS, kind])


@dataclass(frozen=True)
class Lane:
    """Replicas that behave alike.

    Attributes:
        replicas: Their numbers.
        program: What each of them plays.
        up: Classes of a stage's forward messages, a boundary; several where ranks are not folded.
        down: Classes of the backward messages, a boundary.
    """

    replicas: tuple[int, ...]
    program: Program
    up: tuple[tuple[int, ...], ...]
    down: tuple[tuple[int, ...], ...]

    def flows(self, stage: int, kind: int) -> tuple[int, ...]:
        """Classes of the messages after an action."""
        return self.up[stage] if kind == FORWARD else self.down[stage - 1]


@dataclass
class Timeline:
    """When each action of each stage of one lane started.

    Attributes:
        start: Seconds from the start of the step, a list a stage, in the order of its actions.
        free: When a stage was done with its last action and message.
        held_s: Seconds a stage stood waiting for its own messages to leave.
    """

    start: list[list[float]]
    free: list[float]
    held_s: list[float]


@dataclass(frozen=True)
class Exchange:
    """One phase of a collective: coflows that start together, each edge carrying as much.

    Attributes:
        flows: Their classes.
        edge_bytes: Over each edge.
        latency_s: Before the bytes.
    """

    flows: tuple[int, ...]
    edge_bytes: float
    latency_s: float


Collective = tuple[Exchange, ...]


@dataclass(frozen=True)
class Tail:
    """What follows the last backward pass.

    A tied embedding is reduced between first and last stage of each replica, gradients
    over the replicas; the norm of all gradients makes every stage wait for every other;
    then the optimizer, and with ZeRO-1 the gathering of what it wrote.

    Attributes:
        embedding: Of each lane; empty where there is one copy.
        reduce: Of each stage, over all lanes.
        gather: Likewise, for the parameters.
        barrier_s: The reduction of the norm itself.
        optimizer_s: Optimizer of a stage.
        overhead_s: Host work once a step.
    """

    embedding: tuple[Collective, ...]
    reduce: tuple[Collective, ...]
    gather: tuple[Collective, ...]
    barrier_s: float
    optimizer_s: tuple[float, ...]
    overhead_s: float


@dataclass(frozen=True)
class Step:
    """All that is played: the lanes, and what joins them at the end."""

    lanes: tuple[Lane, ...]
    tail: Tail

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.lanes[0].program.stages

    @property
    def ops(self) -> int:
        """Actions of all lanes."""
        return sum(len(codes) for lane in self.lanes for codes in lane.program.table)


@dataclass(frozen=True)
class TailTimes:
    """Seconds that the parts of the tail took, and the end of the step.

    Attributes:
        embedding_s: Of a stage, a lane; waiting for the other copy is not in it.
        reduce_s: Of a stage; from the last lane's arrival.
        gather_s: Of a stage.
        step_s: End of the step.
    """

    embedding_s: tuple[tuple[float, ...], ...]
    reduce_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    step_s: float


@dataclass(frozen=True)
class Played:
    """A whole step: the timeline of each lane, its tail, and what playing it cost."""

    timelines: tuple[Timeline, ...]
    tail: TailTimes
    events: int = 0
    solves: int = 0
