"""A step in closed form: microseconds a layout, for screening.

A pipeline of p stages and m micro-batches takes ``sum of all slots + (m - 1) x the
slowest slot``, a slot being forward, backward and the messages that hold a stage up;
for equal stages that is the ``(m + p - 1)`` slots of Narayanan et al. 2021,
arXiv 2104.04473, section 2.2. Left out: waits between unequal neighbours in the
middle of the step, jitter, and whatever contention does.
"""

from __future__ import annotations

from ..scenarios.schedules import BACKWARD, FORWARD
from .network import TrafficClasses
from .recurrence import close_step
from .timeline import Played, Program, Step, Timeline


def play(step: Step, classes: TrafficClasses) -> Played:
    """A whole step in closed form; its timelines hold no actions."""
    timelines = tuple(_pipeline(lane.program) for lane in step.lanes)
    return Played(timelines, close_step([timeline.free for timeline in timelines], step.tail, classes))


def _pipeline(program: Program) -> Timeline:
    stages = program.stages
    held = [program.holds(stage, FORWARD) + program.holds(stage, BACKWARD) for stage in range(stages)]
    slots = [f + b + h for f, b, h in zip(program.forward_s, program.backward_s, held, strict=True)]
    travel = sum(
        2 * latency + (0.0 if program.send_blocks else up + down)
        for latency, up, down in zip(program.latency_s, program.up_s, program.down_s, strict=True)
    )
    pipeline_s = sum(slots) + (program.micro_batches - 1) * max(slots) + travel
    return Timeline([[] for _ in range(stages)], [pipeline_s] * stages, [program.micro_batches * h for h in held])
