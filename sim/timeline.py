"""What both players of a schedule are given, and what both return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..scenarios.schedules import BACKWARD, FORWARD


@dataclass(frozen=True)
class Program:
    """A schedule with the seconds of its actions: all that the pipeline's timing depends on.

    Attributes:
        table: Actions of each stage in order, as codes (scenarios.schedules.action).
        forward_s: Forward of one micro-batch, a stage.
        backward_s: Backward of one micro-batch, a stage.
        up_s: Message from a stage to the next, latency aside, a boundary.
        down_s: Message back, a boundary.
        latency_s: Latency of a message, a boundary.
        send_blocks: Whether a stage waits until its message has left before it goes on.
        micro_batches: Micro-batches of a step.
        schedule: The table's name, where it has one: some have a quicker way to the same times.
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

    def passes(self, stage: int, kind: int) -> float:
        """Seconds of an action itself."""
        return self.forward_s[stage] if kind == FORWARD else self.backward_s[stage]

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


@dataclass
class Timeline:
    """When each action of each stage started.

    Attributes:
        start: Seconds from the start of the step, a list a stage, in the order of its actions.
        free: When a stage was done with its last action and message.
        held_s: Seconds a stage stood waiting for its own messages to leave.
    """

    start: list[list[float]]
    free: list[float]
    held_s: list[float]


@dataclass(frozen=True)
class Tail:
    """What follows the last backward pass, a stage each.

    A tied embedding is reduced between first and last stage, gradients over the
    replicas; the norm of all gradients makes every stage wait for every other; then
    the optimizer, and with ZeRO-1 the gathering of what it wrote.

    Attributes:
        embedding_bytes: Over each edge of the ring of the two copies; 0 where there is one.
        reduce_bytes: Over each edge of a stage's data-parallel ring.
        gather_bytes: Likewise, for the parameters.
        embedding_latency_s: Latency of the first.
        reduce_latency_s: Of the second.
        gather_latency_s: Of the third.
        barrier_s: The reduction of the norm itself.
        optimizer_s: Optimizer of a stage.
        overhead_s: Host work once a step.
    """

    embedding_bytes: float
    reduce_bytes: tuple[float, ...]
    gather_bytes: tuple[float, ...]
    embedding_latency_s: float
    reduce_latency_s: float
    gather_latency_s: float
    barrier_s: float
    optimizer_s: tuple[float, ...]
    overhead_s: float


@dataclass(frozen=True)
class TailTimes:
    """Seconds each stage spent in the parts of the tail, and the end of the step."""

    embedding_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    step_s: float


@dataclass(frozen=True)
class Played:
    """A whole step: its pipeline, its tail, and what playing it cost."""

    timeline: Timeline
    tail: TailTimes
    events: int = 0
    solves: int = 0
